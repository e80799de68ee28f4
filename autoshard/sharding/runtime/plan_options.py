"""Checks the options of a plan before anything is traced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.autotune.selection import WORDS
from autoshard.sharding.layout.plan_request import Table
from autoshard.sharding.machines.device_mesh import mesh_sizes
from autoshard.sharding.machines.option_requests import read_request
from autoshard.sharding.machines.targets import check_name, find_target
from autoshard.sharding.microbatches.microbatching import read_microbatches
from autoshard.sharding.offload.words import Words, read_words
from autoshard.sharding.pipeline.pipelining import stages_of
from autoshard.sharding.pipeline.schedule_words import read_schedule
from autoshard.sharding.plan.gather_words import AUTO, ONCE, read_gather
from autoshard.sharding.plan.overlap_words import overlap_text, read_overlap
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.program.kernel_records import read_word


def checked_options(
    verify: int | str,
    measure: int,
    offload: Any = None,
    compiler_options: Any = None,
    gather: Any = None,
    overlap: Any = None,
    kernels: Any = None,
    microbatches: Any = None,
    schedule: Any = None,
    allow_numerics: Any = None,
    verify_timeout_s: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Check the types and values of a plan's options.

    Args:
        verify: number of plans to compile, "auto" or "schedule".
        measure: number of plans to run.
        offload: what waits in host memory; None for nothing, or for what a given plan moves.
        compiler_options: the requested options for XLA.
        gather: the order of gathers of parameters; None for `auto`, or for that of a given plan.
        overlap: the table of `overlap=`; None for none, or for that of a given plan.
        kernels: the word of `kernels=`; None for "off", or for the word of a given plan.
        microbatches: the number of microbatches; None for 1, or for that of a given plan.
        schedule: the schedule of the plan's pipeline; None to choose it, or for that of a given plan.
        allow_numerics: whether microbatches may change the results; None for no, or for what a given plan does.
        verify_timeout_s: seconds for all compilations of `verify="auto"` or "schedule"; None for the default.
        **options: `mesh`, `target`, `memory_limit_bytes`, `fixed`, `plan` and `strict`, see `autoshard.plan`.

    Returns:
        The options, with `verify` and `measure` where they are not 0, `offload` as words, `compiler_options` as parts,
        `overlap` as a table, `gather` and `kernels` as one word each, and `microbatches` as a number.

    Raises:
        PlanError: an option is invalid; the message names it.
    """
    for name, count, what in (("verify", verify, "compile for the target"), ("measure", measure, "run")):
        if name == "verify" and count in WORDS:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            words = ", 'auto' or 'schedule'" if name == "verify" else ""
            raise PlanError(f"{name} is {short_repr(count)}; give the number of plans to {what}, 0 for none{words}")
    if verify and measure:
        raise PlanError(f"verify is {verify} and measure is {measure}; both choose among the best plans: give only one")
    if verify_timeout_s is not None and verify not in WORDS:
        raise PlanError(
            f"verify_timeout_s is {short_repr(verify_timeout_s)}, but it applies only to verify='auto' and 'schedule'"
        )
    if verify_timeout_s is not None and not (_is_positive(verify_timeout_s) and math.isfinite(verify_timeout_s)):
        raise PlanError(f"verify_timeout_s is {short_repr(verify_timeout_s)}; give a positive number of seconds")
    request, limit, target = options["plan"], options["memory_limit_bytes"], options["target"]
    if target is not None:
        check_name(target)
    if not isinstance(options["strict"], bool):
        raise PlanError(f"strict is {short_repr(options['strict'])}; give True or False")
    if isinstance(request, Mapping):
        Table.read(request)
    elif request is not None and not isinstance(request, (str, ShardingPlan)):
        raise PlanError(
            f"plan is {short_repr(request)}; give a strategy such as 'fsdp:8', a table such as {{'fsdp': ['batch']}}, "
            "or a Plan"
        )
    if limit is not None and not _is_positive(limit):
        raise PlanError(
            f"memory_limit_bytes is {short_repr(limit)}; give a positive number of bytes for each device, "
            "such as 4 * 2**30"
        )
    words, parts = read_words(offload), read_request(compiler_options)
    count, ticks = read_microbatches(microbatches), read_schedule(schedule)
    chosen = None if schedule is None else ticks
    stages = request.stages if isinstance(request, ShardingPlan) else stages_of(request)
    if stages == 1 and schedule is not None and (request is not None or options["mesh"] is not None):
        raise PlanError(
            f"schedule is {ticks!r}, but the plan has no pipeline; give one with the word pp:N, or neither plan nor "
            "mesh, so that the search chooses the stages"
        )
    if stages > 1 and microbatches is None:
        count = "auto"
    if not isinstance(allow_numerics, bool | None):
        raise PlanError(f"allow_numerics is {short_repr(allow_numerics)}; give True or False")
    order, word = read_gather(gather), read_word("off" if kernels is None else kernels)
    if order == ONCE and stages == 1 and schedule is None and not isinstance(request, ShardingPlan):
        raise PlanError(
            f"gather is {ONCE!r}, but the plan has no pipeline, whose stages would gather their layers once a step; "
            "give one with the word pp:N, or leave gather out"
        )
    table = read_overlap(overlap)
    if isinstance(request, ShardingPlan):
        _check_offload(request, offload, words)
        _check_word("gather", gather, order or AUTO, request.gather or AUTO, request.chosen)
        _check_word("overlap", overlap, overlap_text(table), overlap_text(request.overlap), request.chosen)
        _check_word("kernels", kernels, word, request.kernels_word, request.chosen)
        _check_word("schedule", schedule, ticks, request.schedule, request.chosen)
        if allow_numerics and not request.allow_numerics:
            _check_word("allow_numerics", allow_numerics, allow_numerics, request.allow_numerics, request.chosen)
        if count != "auto":
            _check_word("microbatches", microbatches, count, request.microbatches, request.chosen)
        _check_plan_alone(request, options | {"verify": verify, "measure": measure, "compiler_options": parts})
    options["memory_limit_bytes"] = limit if limit is None else float(limit)
    options |= {"offload": words, "compiler_options": parts, "gather": order, "overlap": table, "kernels": word,
                "microbatches": None if microbatches is None and count == 1 else count, "schedule": chosen,
                "allow_numerics": bool(allow_numerics)}  # fmt: skip
    within = verify_timeout_s and float(verify_timeout_s)
    requested = {"verify": verify, "verify_timeout_s": within, "measure": measure}
    return options | {name: n for name, n in requested.items() if n}


def _check_word(name: str, given: Any, word: Any, kept: Any, chosen: str) -> None:
    """Check that an option that is given beside a `Plan` is the plan's own.

    Raises:
        PlanError: it is another.
    """
    if given is not None and word != kept:
        raise PlanError(
            f"{name} is {short_repr(given)}, but plan is a Plan with {name}={kept!r}. Leave {name} out, or make a new "
            f"plan with plan={chosen!r} and this word"
        )


def _check_offload(plan: ShardingPlan, offload: Any, words: Words) -> None:
    """Check that `offload` names what a `Plan` moves to the host.

    Raises:
        PlanError: it names something else.
    """
    if offload is not None and set(words) != set(plan.offload):
        moved = "+".join(plan.offload) or "nothing"
        raise PlanError(
            f"offload is {short_repr(offload)}, but plan is a Plan that offloads {moved}. "
            f"Leave offload out, or make a new plan with plan={plan.chosen!r} and this offload"
        )


def _check_plan_alone(plan: ShardingPlan, options: Mapping[str, Any]) -> None:
    """Check that a `Plan` comes without options that would choose another one.

    Raises:
        PlanError: there are such options; the message names them.
    """
    mesh, planned, target = options["mesh"], mesh_sizes(plan.mesh), options["target"]
    if mesh is not None and mesh_sizes(mesh) != planned:
        raise PlanError(
            f"plan is a Plan for the mesh {planned}, but mesh is {mesh_sizes(mesh)}. Leave one of them out, or plan "
            "again for this mesh"
        )
    if target is not None and find_target(target).name != plan.target:
        raise PlanError(
            f"plan is a Plan for target '{plan.target}', but target is '{target}'. Leave one of them out, or plan "
            "again for this target"
        )
    names = ("fixed", "memory_limit_bytes", "compiler_options", "verify", "measure")
    given = [f"{name}={short_repr(options[name])}" for name in names if options[name]]
    if given:
        raise PlanError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} given with a Plan, which leaves nothing to "
            f"choose. Leave {'it' if len(given) == 1 else 'them'} out, or make a new plan of this strategy with "
            f"plan={plan.chosen!r}"
        )


def _is_positive(n: Any) -> bool:
    """Return whether `n` is a positive number of any type."""
    try:
        return not isinstance(n, str | bytes | bool) and float(n) > 0
    except (TypeError, ValueError, OverflowError):
        return False
