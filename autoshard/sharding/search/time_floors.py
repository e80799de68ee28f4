"""Leaves out known plans whose lower bound of time exceeds the times of enough other plans.

The time of a plan's kernels and of its collectives, as far as compute cannot hide them, is a lower bound of its step
time. It is a sum over operators, computed in steps (`LeastTime`). Each step raises the bound of the plan whose bound is
the lowest. A plan is priced when its sum is complete. This ends when no other plan can be one of the fastest. So for
most slow plans, only a few operators are priced.

Reports and further searches need some slower plans, too (`_Wanted`). These are priced next.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from autoshard._shown import shown
from autoshard.sharding.layout.constants import MOST_KNOWN_REQUESTS
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import CONTEXT, is_request, parse_request
from autoshard.sharding.search.candidate import Candidate, candidate_ranked_us, estimated_us
from autoshard.sharding.search.constants import (
    ASSIGNED_CANDIDATES,
    KEPT_CANDIDATES,
    MOST_REASSIGNED_GAIN,
    PLANS_WITH_OTHER_ATTENTION,
)
from autoshard.sharding.search.padding import may_gain_padded
from autoshard.sharding.search.strategy_kinds import kind_of

BATCH_KINDS = ("dp", "zero1", "fsdp")


def price_promising(
    layouts: Sequence[tuple[str, Layout]],
    price: Callable[[str, Layout], Candidate],
    least_us: Callable[[Layout], Iterator[float]],
    limit: float,
    most_us: float,
) -> list[Candidate]:
    """Price known plans. Leave out those that are slower than enough others, or slower than `most_us`, in any case.

    Args:
        layouts: the known plans, as (strategy, layout).
        price: prices one of them.
        least_us: yields lower bounds of the step time under a layout, in microseconds (`CostModel.least_us`).
        limit: memory of one device, in bytes.
        most_us: an upper bound of the step time in microseconds. Slower plans are not needed.

    Returns:
        The candidates, in the order of `layouts`.
    """
    priced: dict[int, Candidate] = {}
    wanted = _Wanted(limit)

    def price_one(n: int) -> None:
        priced[n] = price(*layouts[n])
        wanted.add(*layouts[n], priced[n])

    race = Race([least_us(layout) for _, layout in layouts])
    bound_us = _bound_us((), limit, most_us)
    while (plan := race.leader()) and plan.least_us <= bound_us:
        if race.is_complete():
            price_one(plan.number)
            bound_us = _bound_us(priced.values(), limit, most_us)
    while plan:
        if not wanted.needs(*layouts[plan.number], plan.least_us):
            race.drop()
        elif race.is_complete():
            price_one(plan.number)
        plan = race.leader()
    return [priced[n] for n in sorted(priced)]


@shown
class Runner(NamedTuple):
    """A known plan that is not priced yet. Runners are ordered by their bounds.

    Attributes:
        least_us: a lower bound of its step time, in microseconds.
        number: its number among the known plans.
    """

    least_us: float
    number: int


class Race:
    """Known plans, ordered by lower bounds of their step times.

    Args:
        bounds: for each plan, its lower bounds in microseconds, from low to high.
    """

    def __init__(self, bounds: Sequence[Iterator[float]]):
        self._bounds = bounds
        self._heap = [Runner(0.0, n) for n in range(len(bounds))]

    def leader(self) -> Runner | None:
        """Return the plan with the smallest bound; None if none is left."""
        return self._heap[0] if self._heap else None

    def is_complete(self) -> bool:
        """Raise the bound of the leader. If it cannot rise, remove the leader and return True."""
        number = self._heap[0].number
        found = next(self._bounds[number], None)
        if found is None:
            self.drop()
            return True
        heapq.heapreplace(self._heap, Runner(found, number))
        return False

    def drop(self) -> None:
        """Remove the leader."""
        heapq.heappop(self._heap)


class _Wanted:
    """Decides which slower plans are also needed: the best of each kind, other ways of attention, and padded plans.

    Args:
        limit: memory of one device, in bytes.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._best_us = math.inf
        # Need -> inner mesh axes -> the time of the fastest plan with these axes that fits.
        self._times: dict[str, dict[Hashable, float]] = defaultdict(dict)

    def add(self, name: str, layout: Layout, candidate: Candidate) -> None:
        """Note a plan that was priced."""
        if not candidate.fits(self._limit):
            return
        time = candidate_ranked_us(candidate)
        self._best_us = min(self._best_us, time)
        for need, inner, _ in _needs(name):
            known = self._times[need]
            known[inner] = min(time, known.get(inner, math.inf))

    def needs(self, name: str, layout: Layout, least_us: float) -> bool:
        """Return whether a plan that takes at least `least_us` may be needed."""
        for need, _, count in _needs(name):
            fastest = heapq.nsmallest(count, self._times[need].values())
            if len(fastest) < count or least_us <= fastest[-1]:
                return True
        return may_gain_padded(layout, least_us, self._best_us)


@lru_cache(maxsize=MOST_KNOWN_REQUESTS)  # a race asks for the same plans many times; only the name matters
def _needs(name: str) -> tuple[tuple[str, Hashable, int], ...]:
    """Return what a plan may be needed for, as (need, inner mesh axes, count).

    Of a need, the search keeps `count` plans with different inner mesh axes.
    """
    if not is_request(name):
        return ()
    plan = parse_request(name)
    inner = frozenset((a, n) for a, n in plan.sizes.items() if plan.kinds[a] not in (*BATCH_KINDS, "pp"))
    best_of_kind = kind_of(name), None, 1
    if any(plan.kinds[a] in CONTEXT for a, _ in inner):
        return best_of_kind, ("other attention", inner, PLANS_WITH_OTHER_ATTENTION)
    return (best_of_kind,)


def _bound_us(priced: Iterable[Candidate], limit: float, most_us: float) -> float:
    """Return a step time that no further candidate may exceed: the search has enough that are faster.

    These are the fastest `KEPT_CANDIDATES`, and among those that fit the fastest `ASSIGNED_CANDIDATES`. If few fit, the
    bound leaves room for what another device assignment may gain. Without one that fits, there is no bound.
    """
    every = list(priced)
    fastest = heapq.nsmallest(KEPT_CANDIDATES, map(estimated_us, every))
    fitting = heapq.nsmallest(ASSIGNED_CANDIDATES, (candidate_ranked_us(c) for c in every if c.fits(limit)))
    if not fitting:
        return math.inf
    if len(fastest) < KEPT_CANDIDATES:
        return most_us
    enough = fitting[-1] if len(fitting) == ASSIGNED_CANDIDATES else math.inf
    return min(most_us, max(fastest[-1], min(enough, fitting[0] * (1 + MOST_REASSIGNED_GAIN))))
