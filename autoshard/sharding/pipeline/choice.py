"""Compares pipelines with plans that have none, where groups of devices are joined by slow links.

Stages exchange only activations, so a pipeline pays most across slices and hosts. The search tries pipelines on such
targets. If the user gives no number of microbatches, a plan without a pipeline has one, and a pipeline the number that
is fastest. A pipeline has the same products as a plan without, and its stages are idle in some ticks. So it is not
tried if the other plan's compute and these ticks already take longer than the other plan's step.

Of a pipeline whose stages store their layers in shards, two programs are priced (`plan_with_gathers`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard._tracebacks import users_stacklevel
from autoshard._units import bytes_text, time_text
from autoshard.errors import PlanError
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.microbatches.constants import GAIN
from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.pipeline.constants import MOST_MICROBATCHES, MOST_STAGE_COUNTS
from autoshard.sharding.pipeline.schedule_words import DEFAULT, SEARCHED
from autoshard.sharding.pipeline.schedules import FORWARD_ONLY, LEAN
from autoshard.sharding.plan.gather_words import ONCE, REPEAT
from autoshard.sharding.plan.memory_doubt import plan_ranked_us

ONE = "there is one device only; leave out schedule="


def stage_counts(target: Target, mesh: Mapping[str, int] | None = None) -> list[int]:
    """The numbers of stages to try: divisors of the outermost dimension, if its links are slower than inner ones.

    Args:
        target: the machine.
        mesh: the sizes of a mesh that the plan keeps. One of its axes has all stages.
    """
    dims = target.topology.dims
    if len(dims) < 2 or dims[0].bandwidth >= dims[-1].bandwidth:
        return []
    return [n for n in range(2, dims[0].size + 1) if dims[0].size % n == 0 and (mesh is None or n in mesh.values())]


def requested_stage_counts(target: Target, mesh: Mapping[str, int] | None = None) -> list[int]:
    """The numbers of stages to try if a schedule is requested without a plan.

    They are those of slow links, or else the smallest divisors of the number of devices. With a mesh that the plan
    keeps, they are the sizes of its axes.

    Args:
        target: the machine.
        mesh: the sizes of this mesh.
    """
    if mesh is not None:
        return sorted({n for n in mesh.values() if n > 1})
    divisors = [n for n in range(2, target.devices + 1) if target.devices % n == 0]
    return stage_counts(target) or divisors[:MOST_STAGE_COUNTS]


def plan_with_pipelines(
    counts: list[int],
    microbatches: int | str,
    plain: Callable[[], Any],
    staged: Callable[[int, str | None, int | str, float], Any],
) -> Any:
    """Return the best bound plan: one without a pipeline, or one with.

    Args:
        counts: the numbers of stages to try.
        microbatches: the number of microbatches that the user gave; 1 if none.
        plain: makes the plan without a pipeline.
        staged: makes the plan with a pipeline, from the number of stages, the schedule (None chooses it), the number
            of microbatches, and an upper bound of the step time in microseconds. A slower plan is not needed.
    """
    best = first = plain()
    tried: list[str] = []

    def compare(count: int, schedule: str | None, number: int | str) -> None:
        nonlocal best
        most_us = (1 - GAIN) * plan_ranked_us(best.plan) if best.plan.fits else math.inf
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # this plan may not be chosen
                made = staged(count, schedule, number, most_us)
        except TooSlow as found:
            tried.append(f"pp:{count} {schedule or DEFAULT} (at least {time_text(found.least_us)})")
            return
        except PlanError as error:
            if microbatches != 1:
                reason = str(error).partition("): ")[2] or error
                tried.append(f"pp:{count} {schedule or DEFAULT} is not possible: {reason}")
            return
        tried.append(f"{made.plan.chosen} {made.plan.schedule} ({_figures(made)})")
        best = made if _is_better(made, best) else best

    for count in counts:
        if _may_pay(first, count, microbatches):
            compare(count, None, microbatches)
    if best is not first and best.plan.schedule == DEFAULT:
        for schedule in SEARCHED:
            compare(best.plan.stages, schedule, best.plan.microbatches)
        if best.plan.schedule != DEFAULT and microbatches == 1:  # its search was bounded by the plan without a pipeline
            compare(best.plan.stages, DEFAULT, best.plan.microbatches)
    if not tried:
        return best
    text = f"compared {first.plan.chosen} ({_figures(first)}) with pipelines: {'; '.join(tried)}"
    return best.where(notes=(*best.plan.notes, text))


def plan_of_pipelines(name: str, schedule: str, counts: Sequence[int], staged: Callable[[int], Any]) -> Any:
    """Return the best bound plan of a pipeline with a requested schedule.

    Args:
        name: the name of the function.
        schedule: the word of the schedule.
        counts: the numbers of stages to try.
        staged: makes the plan with a number of stages.

    Raises:
        PlanError: the function cannot be cut into any of these numbers of stages.
    """
    made: list[tuple[Any, Sequence[warnings.WarningMessage]]] = []
    tried: list[str] = []
    for count in counts:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made.append((staged(count), caught or ()))
        except PlanError as error:
            tried.append(f"pp:{count} is not possible: {str(error).partition('): ')[2] or error}")
        else:
            tried.append(f"{made[-1][0].plan.chosen} ({_figures(made[-1][0])})")
    if not made:
        raise PlanError(f"auto_shard({name}): schedule {schedule!r} needs a pipeline, but {'; '.join(tried) or ONE}")
    best, caught = min(made, key=lambda each: _rank(each[0]))
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=users_stacklevel())
    return best.where(notes=(*best.plan.notes, f"schedule {schedule} was requested: compared {'; '.join(tried)}"))


def plan_with_gathers(repeat: Any, once: Callable[[], Any]) -> Any:
    """Return the better one of two bound plans, for weights of the stages that are stored in shards.

        repeat  each tick gathers the layers that it runs, one by one, and reduces their gradients. Its memory has the
                shards of weights and gradients, and one or two gathered layers
        once    the layers of a stage are gathered before the first tick, and their gradients reduced after the last
                one. Its memory has all layers of the stage, and their gradients

    The faster one that fits the memory is returned.

    Args:
        repeat: the plan whose stages gather a layer whenever they run it.
        once: makes the plan whose stages gather their layers once a step. It is not called if nothing is stored in
            shards, or if `repeat`, which needs less memory, does not fit.
    """
    if not _axes_of_shards(repeat.layout) or not repeat.plan.fits:
        return repeat
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `repeat` has the same warnings
            other = once()
    except TooSlow as found:
        text = f"compared gather={ONCE!r} (at least {time_text(found.least_us)}) with {REPEAT!r} ({_figures(repeat)})"
        return repeat.where(notes=(*repeat.plan.notes, f"stages gather their layers again in each microbatch: {text}"))
    except PlanError as error:  # such as a fixed sharding that the groups of rows exclude
        reason = str(error).partition("): ")[2] or error
        return repeat.where(notes=(*repeat.plan.notes, f"gather={ONCE!r} is not possible: {reason}"))
    faster = other.plan.fits and plan_ranked_us(other.plan) < plan_ranked_us(repeat.plan)
    best = other if faster else repeat
    text = (f"stages gather their layers {'once a step' if faster else 'again in each microbatch'}: compared "
            f"gather={ONCE!r} ({_figures(other)}) with {REPEAT!r} ({_figures(repeat)})")  # fmt: skip
    return best.where(notes=(*best.plan.notes, text))


def once_notes(layout: Any) -> list[str]:
    """Return notes if a layout gathers nothing under `gather="once"`, or still reduces gradients in each microbatch."""
    storing = _axes_of_shards(layout)
    if not storing:
        return [f"gather={ONCE!r} gathers nothing: no mesh axis beside that of the stages stores shards of parameters"]
    if layout.roles.replicas is None:
        return [f"gather={ONCE!r} gathers weights once a step, but their gradients are reduced over "
                f"{', '.join(storing)} in each microbatch: the plan has no groups of rows"]  # fmt: skip
    return []


def _axes_of_shards(layout: Any) -> list[str]:
    """Return the mesh axes over which parameters are stored in shards, except that of the stages."""
    stages = layout.roles.stages
    return [a for a in layout.storage.get("parameter", ()) if stages not in layout.table.get(a, ())]


def plan_with_schedules(planned: Callable[[str], Any], default: str, lean: Sequence[str] = LEAN) -> Any:
    """Return the bound plan with the default schedule. If it does not fit the memory, look for one that needs less.

    Args:
        planned: makes the plan with a schedule.
        default: the word of the default schedule.
        lean: the words that are tried until a plan fits.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = planned(default)
    made: list[tuple[str, Any, Any]] = [(default, first, caught)]
    for word in () if first.plan.fits or first.plan.schedule == FORWARD_ONLY else lean:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                made.append((word, planned(word), caught))
        except (PlanError, TooSlow):
            continue
        if made[-1][1].plan.fits:
            break
    word, best, caught = min(made, key=lambda each: (not each[1].plan.fits, each[1].plan.estimate.peak_memory_bytes))
    for warning in caught or ():
        warnings.warn(warning.message, warning.category, stacklevel=users_stacklevel())
    if len(made) == 1:
        return best
    tried = ", ".join(f"{name} ({_figures(each)})" for name, each, _ in made)
    return best.where(notes=(*best.plan.notes, f"schedule {default} does not fit the memory: compared {tried}"))


def _may_pay(plain: Any, stages: int, microbatches: int | str) -> bool:
    """Whether a pipeline may be better than a plan without one: that does not fit, or waits long for its links."""
    found = plain.plan.estimate
    count = microbatches if isinstance(microbatches, int) and microbatches > 1 else MOST_MICROBATCHES * stages
    idle = (stages - 1) / count
    return not plain.plan.fits or found.compute_us * (1 + idle) < (1 - GAIN) * found.step_time_us


def _rank(made: Any) -> tuple[bool, float]:
    """A plan that fits comes before one that does not; then the time, or the memory if it does not fit, decides."""
    return not made.plan.fits, plan_ranked_us(made.plan) if made.plan.fits else made.plan.estimate.peak_memory_bytes


def _figures(made: Any) -> str:
    found = made.plan.estimate
    return f"{time_text(found.step_time_us)}, {bytes_text(found.peak_memory_bytes)}"


def _is_better(one: Any, other: Any) -> bool:
    """Whether a plan with a pipeline is better: only it fits the memory, or it is faster by a clear margin."""
    if one.plan.fits != other.plan.fits:
        return one.plan.fits
    if not one.plan.fits:
        return one.plan.estimate.peak_memory_bytes < other.plan.estimate.peak_memory_bytes
    return plan_ranked_us(one.plan) < (1 - GAIN) * plan_ranked_us(other.plan)
