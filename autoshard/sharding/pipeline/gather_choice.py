"""Chooses whether the stages of a pipeline gather their layers once a step, or again in each microbatch.

    repeat  each tick gathers the layers that it runs, one by one, and scatters their gradients
            time: every tick waits for gathers and reductions that compute does not hide
            memory: the shards of weights and gradients, and one or two gathered layers
    once    the layers of a stage are gathered before the first tick, and their gradients reduced after the last one
            time: one gather and one reduction of each layer in a step
            memory: all layers of the stage, and their gradients in the type in which they are summed

Both programs are priced, and the faster one that fits the memory is chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from autoshard._units import bytes_text, time_text
from autoshard.errors import PlanError
from autoshard.sharding.plan.gather_words import ONCE, REPEAT


def plan_with_gathers(repeat: Any, once: Callable[[], Any]) -> Any:
    """Return the better one of two bound plans.

    Args:
        repeat: the plan whose stages gather a layer whenever they run it.
        once: makes the plan whose stages gather their layers once a step. It is not called if nothing is stored in
            shards, or if `repeat`, which needs less memory, does not fit.
    """
    if not repeat.plan.storage.get("parameter") or not repeat.plan.fits:
        return repeat
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `repeat` has the same warnings
            other = once()
    except PlanError as error:  # such as a fixed sharding that the groups of rows exclude
        reason = str(error).partition("): ")[2] or error
        return repeat.where(notes=(*repeat.plan.notes, f"gather={ONCE!r} is not possible: {reason}"))
    faster = other.plan.fits and other.plan.estimate.step_time_us < repeat.plan.estimate.step_time_us
    best = other if faster else repeat
    text = (f"stages gather their layers {'once a step' if faster else 'again in each microbatch'}: compared "
            f"gather={ONCE!r} ({_figures(other)}) with {REPEAT!r} ({_figures(repeat)})")  # fmt: skip
    return best.where(notes=(*repeat.plan.notes, text))


def _figures(made: Any) -> str:
    found = made.plan.estimate
    return f"{time_text(found.step_time_us)}, {bytes_text(found.peak_memory_bytes)}"
