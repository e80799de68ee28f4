"""Notes on code that no plan shards well: Python callbacks, loops of unknown length, sorts over the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from autoshard._units import bytes_text
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.planner.constants import NOTED_GATHER_SHARE
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op, walk

_CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")
_SORTS = ("approx_top_k", "sort", "top_k")


def hindrance_notes(axes: LogicalAxes, roles: Roles, layout: Layout, target: Target, step_us: float) -> list[str]:
    """Return a note for each line of code that no plan shards well.

    Args:
        axes: the logical axes of the program.
        roles: the roles of its inputs and axes.
        layout: the layout of the plan.
        target: the machine.
        step_us: the estimated time of the plan's step, in microseconds.
    """
    ops = list(axes.program.ops())
    notes = [*_callbacks(ops, axes), *_open_loops(ops), *_sorts(ops, axes, roles, layout, target, step_us)]
    return list(dict.fromkeys(notes))


def _callbacks(ops: Iterable[Op], axes: LogicalAxes) -> Iterator[str]:
    """Yield a note for each callback in a loop."""
    for op in ops:
        if op.name not in _CALLBACKS or op.trips <= 1 or op.eqn.params.get("partitioned"):
            continue
        avals = [axes.program.avals[v] for v in (*op.operands, *op.results) if v >= 0]
        gathered = f" Each time, whole arrays ({bytes_text(sum(map(nbytes, avals)))}) are gathered for it."
        is_small = not any(aval.ndim for aval in avals)
        yield (
            f"{op.name}{_at(op)} runs Python on the host in a loop, {op.trips:g} times a step."
            f"{'' if is_small else gathered} The estimate does not include this time. Call it after the "
            f"loop{'' if is_small else ', or give it a small array, such as a mean'}"
        )


def _open_loops(ops: Iterable[Op]) -> Iterator[str]:
    """Yield a note for each loop with products whose number of iterations depends on values."""
    for op in ops:
        if op.name == "while" and any(each.name in CONTRACTIONS for block in op.blocks for each in walk(block)):
            yield (
                f"the loop{_at(op)} has a number of iterations that depends on values, and the estimate counts one "
                "iteration. Use jax.lax.scan or a fixed number of iterations, so that the estimate counts all of them"
            )


def _sorts(
    ops: Iterable[Op], axes: LogicalAxes, roles: Roles, layout: Layout, target: Target, step_us: float
) -> Iterator[str]:
    """Yield a note for each sort over the batch whose gather would take a noticeable share of the step."""
    batch, mesh = roles.batch, tuple(layout.mesh)
    if batch is None or math.prod(layout.mesh.values()) == 1:
        return
    links = target.assign(layout.mesh).links("all-gather", mesh)
    for op in ops:
        if op.name not in _SORTS or op.rule is None:
            continue
        whole = {factor.name for factor in op.rule.factors if factor.kind == "whole"}
        arrays = [(v, dims) for v, dims in zip(op.operands, op.rule.operands, strict=True) if v >= 0]
        moved = sum(
            nbytes(axes.program.avals[v])
            for v, dims in arrays
            if any(batch in leaves and whole & {*dim} for leaves, dim in zip(axes.of_value[v], dims, strict=True))
        )
        gather_us = links.time_us(moved * links.factor / layout.shard_count(mesh)) * op.trips
        if not moved or gather_us < NOTED_GATHER_SHARE * step_us:
            continue
        is_sharded = any(batch in classes for classes in layout.table.values())
        effect = "each device gathers it and repeats the work" if is_sharded else "this plan does not shard the batch"
        yield (
            f"{op.name}{_at(op)} needs the whole batch ({axes.sizes[batch]} rows, {bytes_text(moved)}): {effect}. "
            "Sort within rows, or within groups of rows under jax.vmap"
        )


def _at(op: Op) -> str:
    return f" at {op.line}" if op.line else ""
