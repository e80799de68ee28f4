"""Chooses the number of microbatches: `microbatches="auto"`.

The numbers 1, 2, 4, ... are planned one after the other. Where a number does not divide the batch, the next larger one
that does takes its place. A larger number needs less memory for activations, but often more time, because parameters
are gathered in each microbatch. So the search ends when a number fits and the next one is not clearly faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from autoshard._tracebacks import users_stacklevel
from autoshard._units import bytes_text, time_text
from autoshard.errors import PlanError
from autoshard.sharding.microbatches.constants import GAIN, MOST_TRIALS
from autoshard.sharding.microbatches.microbatching import AUTO, RowsNotDivided, with_microbatches
from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.plan.memory_doubt import plan_ranked_us
from autoshard.sharding.program.tracing import Traced


def plan_in_microbatches(
    traced: Traced,
    count: int | str,
    planned: Callable[[Traced], Any],
    cut: Callable[[Traced, int], Traced] = with_microbatches,
    least: int = 1,
) -> Any:
    """Plan a step in microbatches.

    Args:
        traced: the step.
        count: the number of microbatches, or "auto".
        planned: makes a bound plan of a step that is already rewritten.
        cut: cuts a step into a number of microbatches.
        least: the smallest number that "auto" tries. The next one is twice as large. Where a number does not divide the
            batch, the next larger one that does takes its place.

    Raises:
        PlanError: the step cannot be cut into this number.
        TooSlow: no number has a plan that is fast enough.
    """
    if count != AUTO:
        return planned(cut(traced, int(count)))
    made: list[tuple[int, Any, list[Any]]] = []
    reason, least_us = "", math.inf
    slow: list[TooSlow] = []  # of the last numbers that were tried
    number, step = _cut_from(traced, cut, least)
    for _ in range(MOST_TRIALS):
        try:
            number, step = _cut_from(traced, cut, 2 * number) if made or slow else (number, step)
        except PlanError as error:
            reason = str(error).partition("): ")[2]
            break
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                made.append((number, planned(step), caught or []))
                slow.clear()
            except TooSlow as found:
                slow.append(found.with_traceback(None))  # whose frames keep the program alive
                least_us = min(least_us, found.least_us)
        if slow:
            if _are_enough(slow) or (made and made[-1][1].plan.fits):
                break
            continue
        if len(made) > 1 and made[-2][1].plan.fits and not _is_better(made[-1][1], made[-2][1]):
            break
    if not made:
        raise TooSlow(least_us, slow[-1].is_final)
    number, bound, caught = _best(made)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=users_stacklevel())
    figures = [f"{n} ({time_text(b.plan.estimate.step_time_us)}, {bytes_text(b.plan.estimate.peak_memory_bytes)})"
               for n, b, _ in made]  # fmt: skip
    text = f"microbatches='auto' compared {', '.join(figures)}, and chose {number}"
    return bound.where(notes=(*bound.plan.notes, f"{text}. {reason}" if reason else text))


def _are_enough(slow: Sequence[TooSlow]) -> bool:
    """Whether to stop after these numbers were too slow: more microbatches cannot help, or the last ones did not."""
    return slow[-1].is_final or (len(slow) > 1 and slow[-1].least_us >= (1 - GAIN) * slow[-2].least_us)


def _cut_from(traced: Traced, cut: Callable[[Traced, int], Traced], least: int) -> tuple[int, Traced]:
    """Return the smallest possible number of microbatches from `least` on, and the step with these microbatches."""
    try:
        return least, cut(traced, least)
    except RowsNotDivided as error:
        if not (larger := error.counts(least)):
            raise
    return larger[0], cut(traced, larger[0])


def _best(made: list[tuple[int, Any, list[Any]]]) -> tuple[int, Any, list[Any]]:
    fitting = [one for one in made if one[1].plan.fits]
    if not fitting:
        return min(made, key=lambda one: one[1].plan.estimate.peak_memory_bytes)
    best = fitting[0]
    for one in fitting[1:]:
        best = one if _is_better(one[1], best[1]) else best
    return best


def _is_better(one: Any, other: Any) -> bool:
    """Whether a plan fits and is faster than another one by a clear margin."""
    return one.plan.fits and plan_ranked_us(one.plan) < (1 - GAIN) * plan_ranked_us(other.plan)
