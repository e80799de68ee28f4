"""Cuts a traced step into the stages of a pipeline: `pp:N`, `schedule=`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard._units import bytes_text
from autoshard.errors import PlanError
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.layout.request_scaling import stages_in
from autoshard.sharding.microbatches.accumulation import Runner, Terms
from autoshard.sharding.microbatches.microbatching import (
    RowsNotDivided,
    batch_rows,
    divisors,
    with_microbatches,
)
from autoshard.sharding.offload.words import OPTIMIZER, NotMovable
from autoshard.sharding.pipeline.hoisted_casts import hoist_casts
from autoshard.sharding.pipeline.layers.forward_layers import find_layers
from autoshard.sharding.pipeline.layers.layer_chains import split_chains
from autoshard.sharding.pipeline.layers.rolled_layers import roll_layers
from autoshard.sharding.pipeline.schedule_words import DEFAULT, chunks_of, make_schedule
from autoshard.sharding.pipeline.schedules import BACKWARD, WITH_RESIDUALS, Schedule, forward_only
from autoshard.sharding.pipeline.slots import NotOffloaded, has_transfers
from autoshard.sharding.pipeline.stage_cut import NotStaged, TooManyStages, cut_stages, find_stacks, other_layers
from autoshard.sharding.pipeline.stage_loop import StageLoop
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.evaluation import rewritten
from autoshard.spmdrules.families.stacked.stages import stack_layers, stage_sizes


def stages_of(plan: Any) -> int:
    """Return the number of stages that a requested plan asks for: N of its word `pp:N`, else 1."""
    if not isinstance(plan, str):
        return 1
    return stages_in(parse_request(plan))


def with_stages(
    traced: Traced,
    microbatches: int,
    *,
    stages: int,
    schedule: str = DEFAULT,
    replicas: int = 1,
    numerics: bool = False,
    gathers_once: bool = False,
    fewer: Callable[[int], str] | None = None,
) -> Traced:
    """Return a traced step whose layers run in stages. Its results are the same up to the order of sums.

    Args:
        traced: the step.
        microbatches: number of microbatches.
        stages: number of stages.
        schedule: the word of the schedule.
        replicas: number of groups of rows whose sums are added after the loop, see `with_microbatches`.
        numerics: whether the results may differ, see `with_microbatches`.
        gathers_once: whether the stages gather their layers once a step, before the loop over the ticks.
        fewer: returns a plan with at most a given number of stages, for the error message; "" if there is none.

    Raises:
        NotMovable: the stages cannot move a value that the step moves to the host.
        PlanError: the step has no repeated part or fewer layers than stages, there are too few microbatches, or the
            step cannot be cut into microbatches.
    """
    if microbatches < stages:
        raise PlanError(
            f"auto_shard({traced.name}): pp:{stages} with {microbatches} microbatch{'es' * (microbatches > 1)} leaves "
            f"stages idle all the time; {_possible_counts(batch_rows(traced), stages)}"
        )
    found = _Found(table=make_schedule(schedule, stages, microbatches), gathers_once=gathers_once)
    try:
        run = _runner(found)
        cut = with_microbatches(traced, microbatches, run, replicas=replicas, numerics=numerics, prepare=split_chains)
    except RowsNotDivided as error:
        raise RowsNotDivided(
            f"auto_shard({traced.name}): pp:{stages} with {microbatches} microbatches, which do not divide the batch "
            f"of {error.rows} rows; {_possible_counts(error.rows, stages)}",
            error.rows,
        ) from None
    except NotOffloaded as reason:
        moved = "+".join(word for word in traced.offloaded if word != OPTIMIZER)
        keeping = f", or schedule={WITH_RESIDUALS[schedule]!r}" if schedule in WITH_RESIDUALS else ""
        given = f"offload={moved!r}" if moved else "values that the step's own policy moves to the host"
        instead = f"use offload={OPTIMIZER!r}" if moved else "let the policy keep them on the device"
        raise NotMovable(
            f"auto_shard({traced.name}): pp:{stages} with {given}: {reason}; {instead}{keeping}, or leave out "
            f"pp:{stages}"
        ) from None
    except TooManyStages as reason:
        words = fewer(reason.most) if fewer is not None else ""
        advice = f"Request '{words}'" if words else _at_most(reason.most)
        raise PlanError(
            f"auto_shard({traced.name}): pp:{stages}, but the function cannot be cut: {reason}. {advice}"
        ) from None
    except NotStaged as reason:
        raise PlanError(f"auto_shard({traced.name}): pp:{stages}, but the function cannot be cut: {reason}") from None
    closed = _without_layer_maps(cut.closed)
    return replace(cut, closed=closed, stages=stages, stage_layers=tuple(found.sizes), schedule=found.table.name,
                   stage_bytes=found.bytes, unstaged_layers=found.others)  # fmt: skip


def _possible_counts(rows: int, stages: int) -> str:
    """Say which numbers of microbatches a batch allows for a number of stages."""
    counts = divisors(rows, stages)
    if not counts:
        return f"there must be at least as many rows as stages, and the batch has {rows}: use fewer stages or more rows"
    shown = " or ".join(filter(None, (", ".join(map(str, counts[:-1])), str(counts[-1]))))
    return f"use at least {stages} microbatches: microbatches={shown}"


def _at_most(stages: int) -> str:
    return f"There can be at most {stages} stages" if stages > 1 else "Leave pp out"


def stage_notes(traced: Traced) -> list[str]:
    """Notes on what stages keep, on layers that they exchange, on idle stages, and on layers that are on no stage."""
    others = [f"{place} are on no stage: all stages compute them for each microbatch, because a pipeline has one stack"
              for place in traced.unstaged_layers]  # fmt: skip
    return [*_kept_notes(traced), *_layer_notes(traced), *others]


def _kept_notes(traced: Traced) -> list[str]:
    """A note on the bytes of what stages keep, if they keep inputs."""
    other = WITH_RESIDUALS.get(traced.schedule)
    if other is None:
        return []
    inputs, residuals = map(bytes_text, traced.stage_bytes)
    return [f"schedule {traced.schedule}: a stage holds its input, {inputs} a microbatch, in place of residuals, "
            f"{residuals} ({other}); sizes before other mesh axes shard them"]  # fmt: skip


def _layer_notes(traced: Traced) -> list[str]:
    """Notes on layers that the stages exchange, on stages with different numbers of layers, and on idle stages."""
    sizes, chunks, notes = traced.stage_layers, chunks_of(traced.schedule), []
    slots = chunks * -(-sum(sizes) // (chunks * max(len(sizes), 1)))  # the layers whose time each stage takes
    if chunks > 1 or len({*sizes}) > 1:
        uneven = sum(sizes) < slots * len(sizes)
        of_stages = f": {', '.join(map(str, sizes))}" if uneven else f", {chunks} chunks of {slots // chunks} on each"
        of_slots = f"each stage takes the time and memory of {slots}, and " if uneven else ""
        notes.append(f"{sum(sizes)} layers on {len(sizes)} stages{of_stages}; {of_slots}the stages exchange the "
                     "weights of the layers once a step")  # fmt: skip
    if chunks > 1 and (rest := traced.microbatches % traced.stages):
        more = traced.microbatches + traced.stages - rest
        notes.append(f"{traced.microbatches} microbatches are no multiple of {traced.stages} stages, so stages wait "
                     f"between their chunks; microbatches={more} avoids that")  # fmt: skip
    return notes


def _without_layer_maps(closed: Any) -> Any:
    """Run loops that carry nothing, such as casts of the weights layer by layer, for all layers at once.

    If it stayed a loop, each stage would run it for the layers of all stages.
    """
    jaxpr = _compat.open_jaxpr(closed)

    def run(*args: Any) -> list[Any]:
        env = dict(zip(jaxpr.constvars, _compat.constants(closed), strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        for eqn in jaxpr.eqns:
            operands = [a.val if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
            with _compat.source_of(eqn):
                env |= zip(eqn.outvars, _mapped_or_bound(eqn, operands), strict=True)
        return [a.val if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars]

    return _compat.dce(jax.make_jaxpr(run)(*map(_compat.shape_dtype_of, jaxpr.invars)))


def _mapped_or_bound(eqn: Any, operands: list[Any]) -> list[Any]:
    consts, carries = _compat.scan_arity(eqn.params) if eqn.primitive.name == "scan" else (0, 1)
    if carries or len(operands) == consts:
        return _compat.bind(eqn, eqn.params, *operands)
    body = _compat.jaxpr_as_function(eqn.params["jaxpr"])
    return jax.vmap(body, in_axes=(*[None] * consts, *[0] * (len(operands) - consts)))(*operands)


@shown
@dataclass
class _Found:
    """What the cut of a step finds.

    Attributes:
        table: the schedule. A function without gradients runs only its forward parts.
        sizes: the number of layers of each stage.
        bytes: the bytes of a stage's input and of its residuals, for one microbatch.
        others: the places of the stacks of layers that are on no stage.
        gathers_once: whether the stages gather their layers once a step. It is given.
    """

    table: Schedule
    sizes: tuple[int, ...] = ()
    bytes: tuple[int, int] = (0, 0)
    others: tuple[str, ...] = ()
    gathers_once: bool = False


def _runner(found: _Found) -> Runner:
    """What runs the microbatches in stages. It completes `found`."""

    def run(one: Callable[[Any, list[Any]], Terms], rows: list[Any], ops: list[str]) -> Terms:
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]
        closed = rewritten(jax.make_jaxpr(one)(jax.ShapeDtypeStruct((), jnp.int32), shapes))
        jaxpr, whole = _compat.split_constants(closed)
        groups = [(n,) for n in range(len(ops))]
        layers: list[list[Any]] = []
        in_scans = find_stacks(jaxpr, len(whole)) or find_layers(jaxpr, len(whole))[0]
        if not in_scans and has_transfers(jaxpr):
            raise NotOffloaded("layers that are no jax.lax.scan keep their residuals in device memory")
        if not in_scans and (rolled := roll_layers(jaxpr, len(whole), ops)):
            layers = [[whole[n] for n in positions] for positions in rolled.stacks]
            whole = [*rolled.constants, *whole, *(stack_layers(*each) for each in layers)]
            jaxpr, groups = rolled.jaxpr, rolled.sums
        jaxpr, constants = hoist_casts(jaxpr, len(whole))
        whole = [*constants, *whole]
        separate = dict(zip(jaxpr.invars[len(whole) - len(layers) : len(whole)], layers, strict=True))
        table = found.table
        cut = cut_stages(jaxpr, len(whole), len(groups), table.stages, table.chunks)
        found.others = tuple(other_layers(jaxpr, len(whole), cut))
        found.sizes = tuple(np.reshape(stage_sizes(cut.forward.layers, table.stages * table.chunks),
                                       (table.chunks, table.stages)).sum(axis=0).tolist())  # fmt: skip
        found.bytes = cut.input_bytes, cut.residual_bytes * max(found.sizes) // cut.forward.layers
        if cut.backward.eqn is None:
            found.table = forward_only(table)
        elif BACKWARD not in table.ticks:
            raise NotStaged(f"schedule {table.name!r} is for functions without gradients; use {DEFAULT!r}")
        results = dict(zip(jaxpr.outvars, groups, strict=False))
        combined = {var: ops[group[0]] for var, group in results.items()}
        apart = {var for var, group in results.items() if len(group) > 1}
        with _compat.line_of(cut.forward.eqn):
            loop = StageLoop(cut, found.table, combined, rows, whole, separate, gathers_once=found.gathers_once)
            values = loop.run(apart)
        sums: dict[int, Any] = {}
        for var, group in zip(jaxpr.outvars, groups, strict=False):
            sums |= zip(group, values[var] if var in apart else [values[var]], strict=True)
        return [sums[n] for n in range(len(ops))], [values[var] for var in jaxpr.outvars[len(groups) :]]

    return run
