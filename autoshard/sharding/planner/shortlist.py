"""Which candidates are compiled or run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.sharding.layout.plan_request import is_request
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.variants import Made, fastest, variant_table

Ranked = tuple[Any, ...]  # step time in microseconds, peak bytes, and what they are of


ALIKE = 0.001
"""Difference in time and in memory up to which two plans are taken for one program."""


LOOKED_AT = 4
"""How many times as many candidates as are compiled or run are looked at for those that are not alike."""


@dataclass(frozen=True)
class Shortlist:
    """How the best candidates are told apart.

    Attributes:
        count: how many of them.
        judge: the best of their plans, the best by the estimate first, given what a device's memory holds.
        over: how many times that memory one more may take by the estimate, and one more still; they come last.
    """

    count: int
    judge: Callable[[Sequence[BoundPlan], float], BoundPlan]
    over: tuple[float, ...] = ()

    def beyond(self, ranked: Iterable[Ranked], limit: float, most_us: float) -> list[Ranked]:
        """Of candidates `(time, bytes, ...)` that hardly do not fit those which take less time than what takes less."""
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
    """Of the best candidates of all variants the one that wins a contest.

    Args:
        made: the variants, each with its plan.
        asked: the contest.
        replan: plans the program of a plan by a candidate's words; None where words that were asked for are refused.
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

    for *_, n, words in without_near_duplicates(ranked[: LOOKED_AT * asked.count]):
        if len(plans) == asked.count:
            break
        add(n, words)
    for *_, n, words in asked.beyond(every, limit, ranked[0][0]):
        add(n, words)
    plans = plans or [fastest(made)]
    return asked.judge(plans, limit)


def without_near_duplicates(ranked: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Candidates `(time, bytes, ...)` with those last that differ from an earlier one in next to nothing.

    What is told apart by less than `ALIKE` in time and memory both is one program in other words: to compile both
    says little.
    """
    first: list[tuple[Any, ...]] = []
    again: list[tuple[Any, ...]] = []
    for each in ranked:
        near = any(all(abs(a - b) <= ALIKE * b for a, b in zip(each[:2], other[:2], strict=True)) for other in first)
        (again if near else first).append(each)
    return [*first, *again]
