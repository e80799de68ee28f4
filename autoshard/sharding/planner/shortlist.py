"""The shortlist: which candidates are compiled or run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.layout.plan_request import is_request
from autoshard.sharding.plan.memory_doubt import ranked_us, usable_bytes_of
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.constants import SAME_PROGRAM, SHORTLIST_POOL
from autoshard.sharding.planner.variants import PlannedVariant, fastest, variant_table

Ranked = tuple[Any, ...]  # step time in microseconds, peak bytes, and a candidate or its variant and strategy


@shown
@dataclass(frozen=True)
class Shortlist:
    """How the best candidates are compared.

    Attributes:
        count: how many candidates.
        judge: takes the plans, the best by the estimate first, and the memory limit in bytes; returns one of the plans.
        over: multiples of the memory limit. For each, one more candidate is compared: the fastest whose estimated peak
            is between the limit and this multiple. These come last.
    """

    count: int
    judge: Callable[[Sequence[BoundPlan], float], BoundPlan]
    over: tuple[float, ...] = ()

    def beyond(self, ranked: Iterable[Ranked], limit: float, most_us: float) -> list[Ranked]:
        """For each multiple in `over`, the fastest candidate between the memory limit and this multiple of it.

        Candidates are tuples `(time, bytes, ...)`. Each result must be faster than `most_us`, and faster than the
        results for earlier multiples.
        """
        found: list[Ranked] = []
        every = list(ranked)
        for over in self.over:
            within = [each for each in every if limit < each[1] <= over * limit and each[0] < most_us]
            if within:
                found.append(min(within, key=lambda each: each[0]))
                most_us = found[-1][0]
        return found


def fastest_of_all(
    made: Sequence[PlannedVariant], shortlist: Shortlist, replan: Callable[[BoundPlan, str], BoundPlan | None]
) -> BoundPlan:
    """The plan that the judge prefers among the best candidates of all variants.

    Args:
        made: the variants, each with its plan.
        shortlist: how the candidates are compared.
        replan: plans the program of a plan again under another strategy; returns None if that raises an error.
    """
    limit, usable = (
        made[0][1].plan.limit_bytes or math.inf,
        usable_bytes_of(made[0][1].plan),
    )  # the same for all variants
    pool: list[Ranked] = []
    every: list[Ranked] = []
    for n, (_, bound) in enumerate(made):
        plan = bound.plan
        found = [(time, peak, n, strategy) for strategy, time, peak in plan.candidates if is_request(strategy)]
        every += found
        pool += [each for each in found if each[1] <= limit and each[-1] != plan.chosen]
        pool.append((plan.estimate.step_time_us if plan.fits else math.inf, plan.estimate.peak_memory_bytes, n, None))
    ranked = sorted(pool, key=lambda each: ranked_us(each[0], each[1], usable))
    plans: list[BoundPlan] = []

    def add(n: int, strategy: str | None) -> None:
        choice, bound = made[n]
        found = bound if strategy is None else replan(bound, strategy)
        if found is not None:
            plans.append(variant_table(found, choice, made))

    for *_, n, strategy in without_near_duplicates(ranked[: SHORTLIST_POOL * shortlist.count]):
        if len(plans) == shortlist.count:
            break
        add(n, strategy)
    for *_, n, strategy in shortlist.beyond(every, limit, ranked[0][0]):
        add(n, strategy)
    plans = plans or [fastest(made)]
    return shortlist.judge(plans, limit)


def without_near_duplicates(ranked: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Candidates `(time, bytes, ...)`, with those that nearly equal an earlier one moved to the end.

    Two candidates that differ by less than `SAME_PROGRAM` in both time and memory are most likely the same program.
    Compiling both is of little use.
    """
    distinct: list[tuple[Any, ...]] = []
    duplicates: list[tuple[Any, ...]] = []
    for each in ranked:
        near = any(
            all(abs(a - b) <= SAME_PROGRAM * b for a, b in zip(each[:2], other[:2], strict=True)) for other in distinct
        )
        (duplicates if near else distinct).append(each)
    return [*distinct, *duplicates]
