"""The shortlist: which candidates are compiled or run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.sharding.layout.plan_request import is_request
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.constants import SAME_PROGRAM, SHORTLIST_POOL
from autoshard.sharding.planner.variants import Made, fastest, variant_table

Ranked = tuple[Any, ...]  # step time in microseconds, peak bytes, and what they are of


@dataclass(frozen=True)
class Shortlist:
    """How the best candidates are compared.

    Attributes:
        count: how many candidates.
        judge: chooses one of their plans, given in the order of the estimate, and the memory limit in bytes.
        over: multiples of the memory limit. For each, one candidate more is compared whose estimated peak is up to that
            much; these come last.
    """

    count: int
    judge: Callable[[Sequence[BoundPlan], float], BoundPlan]
    over: tuple[float, ...] = ()

    def beyond(self, ranked: Iterable[Ranked], limit: float, most_us: float) -> list[Ranked]:
        """Candidates `(time, bytes, ...)` just above the limit that are faster than all with less memory."""
        found: list[Ranked] = []
        every = list(ranked)
        for over in self.over:
            within = [each for each in every if limit < each[1] <= over * limit and each[0] < most_us]
            if within:
                found.append(min(within, key=lambda each: each[0]))
                most_us = found[-1][0]
        return found


def fastest_of_all(
    made: Sequence[Made], asked: Shortlist, replan: Callable[[BoundPlan, str], BoundPlan | None]
) -> BoundPlan:
    """The plan that the judge prefers among the best candidates of all variants.

    Args:
        made: the variants, each with its plan.
        asked: the shortlist.
        replan: plans the program of a plan again under another strategy; None where that strategy is refused.
    """
    limit = made[0][1].plan.limit_bytes or math.inf  # one machine's
    pool: list[Ranked] = []
    every: list[Ranked] = []
    for n, (_, bound) in enumerate(made):
        plan = bound.plan
        found = [(time, peak, n, words) for words, time, peak in plan.candidates if is_request(words)]
        every += found
        pool += [each for each in found if each[1] <= limit and each[-1] != plan.chosen]
        pool.append((plan.estimate.step_time_us if plan.fits else math.inf, plan.estimate.peak_memory_bytes, n, None))
    ranked = sorted(pool, key=lambda each: each[0])
    plans: list[BoundPlan] = []

    def add(n: int, words: str | None) -> None:
        choice, bound = made[n]
        found = bound if words is None else replan(bound, words)
        if found is not None:
            plans.append(variant_table(found, choice, made))

    for *_, n, words in without_near_duplicates(ranked[: SHORTLIST_POOL * asked.count]):
        if len(plans) == asked.count:
            break
        add(n, words)
    for *_, n, words in asked.beyond(every, limit, ranked[0][0]):
        add(n, words)
    plans = plans or [fastest(made)]
    return asked.judge(plans, limit)


def without_near_duplicates(ranked: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Candidates `(time, bytes, ...)`, with those that nearly equal an earlier one moved to the end.

    Two candidates that differ by less than `SAME_PROGRAM` in both time and memory are most likely the same program.
    Compiling both gains little.
    """
    first: list[tuple[Any, ...]] = []
    again: list[tuple[Any, ...]] = []
    for each in ranked:
        near = any(
            all(abs(a - b) <= SAME_PROGRAM * b for a, b in zip(each[:2], other[:2], strict=True)) for other in first
        )
        (again if near else first).append(each)
    return [*first, *again]
