"""Decides whether each device updates only some of the matrices (`rewrite.updates`).

Both programs are planned. The faster one that fits the memory is chosen. Whole matrices are usually faster, because
otherwise every device repeats the products of all matrices. Shards may be faster if tensor or expert parallelism
already divides the products, or if there are more devices than matrices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from autoshard.errors import PlanError
from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.plan.memory_doubt import plan_ranked_us
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.updates.spread_updates import with_spread_updates


def plan_with_spread_updates(
    traced: Traced,
    devices: int,
    first: Callable[..., Any],
    second: Callable[..., Any],
    most_us: float,
    shortlist: Any,
) -> Any:
    """Return the better of two bound plans: with and without updates of whole matrices.

    Args:
        traced: the step.
        devices: the number of devices.
        first: plans a program. It may use what earlier searches of the caller found.
        second: plans a program in the same way, with a search of its own.
        most_us: a search may leave out plans whose step takes this many microseconds or more.
        shortlist: how the best candidates of the chosen program are compared.
    """
    spread = with_spread_updates(traced, devices)
    if spread is traced:
        return first(traced, most_us=most_us, shortlist=shortlist)
    made = _planned(first, spread, most_us, is_quiet=bool(shortlist))
    if made is None:
        return first(traced, most_us=most_us, shortlist=shortlist)
    bound_us = min(most_us, plan_ranked_us(made.plan)) if made.plan.fits else most_us
    other = _planned(second, traced, bound_us, is_quiet=True)
    best = made if other is None else min(made, other, key=_rank)
    if not shortlist:
        return best
    return second(spread if best.plan.spread_updates else traced, most_us=most_us, shortlist=shortlist)


def _planned(plan: Callable[..., Any], traced: Traced, most_us: float, is_quiet: bool) -> Any:
    """Return the plan of a program; None if it has none, for example because it lacks a requested logical axis.

    Args:
        plan: plans the program.
        traced: the program.
        most_us: see `plan_with_spread_updates`.
        is_quiet: whether to hide warnings, because planning the other program shows the same ones.
    """
    with warnings.catch_warnings():
        if is_quiet:
            warnings.simplefilter("ignore")
        try:
            return plan(traced, most_us=most_us)
        except (PlanError, TooSlow):
            return None


def _rank(bound: Any) -> tuple[bool, float]:
    if not bound.plan.fits:
        return True, bound.plan.estimate.peak_memory_bytes
    return False, plan_ranked_us(bound.plan)
