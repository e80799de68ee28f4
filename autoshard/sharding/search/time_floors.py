"""Prices known plans, except those that are too slow in any case.

Known plans that have the same inner mesh axes (`cp`, `ep`, `tp`) form a group. They differ in how they shard the batch
over the other devices and in how they store state, but each device has the same rows and the same part of the weights.
So the kernels and the collectives of their activations take the same time (`StepCost.rows_us`); those of the optimizer
do not. This time is the least that any plan of the group takes.

It is a sum over operators. The groups compete with the part that is known of their sums (`RowsTime`): the group with
the smallest part goes on, and its plans are priced when its sum is complete. This ends when no other group can contain
one of the fastest plans. So most groups of slow plans cost the price of a few operators only.

Reports and further searches need some slower plans, too (`_Wanted`). Of the groups that may contain these, one plan is
priced.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.layout.divisibility import undivided
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import CONTEXT, is_request, parse_request
from autoshard.sharding.search.candidate import Candidate
from autoshard.sharding.search.constants import (
    ASSIGNED_CANDIDATES,
    FLOOR_ERROR,
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
    rows_us: Callable[[Layout], Iterator[float]],
    limit: float,
    most_us: float,
) -> list[Candidate]:
    """Price known plans. Leave out those that are slower than enough others, or slower than `most_us`, in any case.

    Args:
        layouts: the known plans, as (strategy, layout).
        price: prices one of them.
        rows_us: yields lower bounds of the time of rows under a layout, in microseconds (`CostModel.rows_us`).
        limit: memory of one device, in bytes.
        most_us: an upper bound of the step time in microseconds. Slower plans are not needed.

    Returns:
        The candidates, in the order of `layouts`.
    """
    priced: dict[int, Candidate] = {}
    wanted = _Wanted(limit)

    def price_all(numbers: Iterable[int]) -> None:
        for n in numbers:
            if n not in priced:
                priced[n] = price(*layouts[n])
                wanted.add(*layouts[n], priced[n])

    race = _Race(layouts, rows_us)
    while (group := race.leader()) and group.rows_us * (1 - FLOOR_ERROR) <= _bound_us(priced.values(), limit, most_us):
        if race.is_complete(group):
            price_all(group.members)
    while group:
        if not wanted.needs(*layouts[group.members[0]], group.rows_us):
            race.drop(group)
        elif race.is_complete(group):
            price_all(group.members[:1])
        group = race.leader()
    return [priced[n] for n in sorted(priced)]


@shown
@dataclass(eq=False)
class _Group:
    """A group of known plans.

    Attributes:
        members: their numbers, the one to price first before the others.
        rows_us: a lower bound of their time of rows, in microseconds.
    """

    members: list[int]
    rows_us: float = 0.0


class _Race:
    """Groups of known plans, by the part of the time of rows that is known.

    Args:
        layouts: the known plans.
        rows_us: see `price_promising`.
    """

    def __init__(self, layouts: Sequence[tuple[str, Layout]], rows_us: Callable[[Layout], Iterator[float]]):
        self._bounds: dict[int, Iterator[float]] = {}
        self._heap: list[tuple[float, int, _Group]] = []
        for number, members in enumerate(groups_of(layouts)):
            self._bounds[number] = rows_us(layouts[members[0]][1])
            self._heap.append((0.0, number, _Group(members)))

    def leader(self) -> _Group | None:
        """Return the group with the smallest bound; None if none is left."""
        return self._heap[0][2] if self._heap else None

    def is_complete(self, group: _Group) -> bool:
        """Raise the bound of the leader. If it cannot rise, remove the leader and return True."""
        _, number, _ = self._heap[0]
        found = next(self._bounds[number], None)
        if found is None:
            self.drop(group)
            return True
        group.rows_us = found
        heapq.heapreplace(self._heap, (found, number, group))
        return False

    def drop(self, group: _Group) -> None:
        """Remove the leader."""
        assert self._heap[0][2] is group
        heapq.heappop(self._heap)


class _Wanted:
    """What needs slower plans: the best plan of each kind, other ways of attention, and the gains of padding.

    Args:
        limit: memory of one device, in bytes.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._best_us = math.inf
        # What needs plans -> inner mesh axes -> the time of the fastest plan with them that fits.
        self._times: dict[str, dict[Hashable, float]] = defaultdict(dict)

    def add(self, name: str, layout: Layout, candidate: Candidate) -> None:
        """Note a plan that was priced."""
        if not candidate.fits(self._limit):
            return
        time = candidate.cost.step_time_us
        self._best_us = min(self._best_us, time)
        for need, inner, _ in _needs(name):
            known = self._times[need]
            known[inner] = min(time, known.get(inner, math.inf))

    def needs(self, name: str, layout: Layout, least_us: float) -> bool:
        """Whether a plan that takes at least `least_us` may be needed."""
        for need, _, count in _needs(name):
            fastest = heapq.nsmallest(count, self._times[need].values())
            if len(fastest) < count or least_us <= fastest[-1]:
                return True
        return may_gain_padded(layout, least_us, self._best_us)


def _needs(name: str) -> Iterator[tuple[str, Hashable, int]]:
    """Yield what may need a plan, its inner mesh axes, and how many different ones are needed at most."""
    if not is_request(name):
        return
    plan = parse_request(name)
    inner = frozenset((a, n) for a, n in plan.sizes.items() if plan.kinds[a] not in (*BATCH_KINDS, "pp"))
    yield kind_of(name), None, 1
    if any(plan.kinds[a] in CONTEXT for a, _ in inner):
        yield "other attention", inner, PLANS_WITH_OTHER_ATTENTION


def groups_of(layouts: Sequence[tuple[str, Layout]]) -> list[list[int]]:
    """Return the groups of known plans, by their numbers. The first of a group is the one to price first."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for n, (name, layout) in enumerate(layouts):
        groups[_group(name, layout)].append(n)
    return [sorted(members, key=lambda n: _order(*layouts[n]), reverse=True) for members in groups.values()]


def _group(name: str, layout: Layout) -> Hashable:
    """Return what plans have in common whose kernels take the same time: all but the kinds of the batch's mesh axes."""
    if not is_request(name):
        return name
    plan = parse_request(name)
    inner = tuple((a, plan.kinds[a], n) for a, n in plan.sizes.items() if plan.kinds[a] not in BATCH_KINDS)
    # Where the mesh axes of a sequence store state, they also shard the products that compute gradients.
    flags = plan.flags if any(kind in CONTEXT for _, kind, _ in inner) else plan.flags - {"state"}
    return inner, flags, plan.changes, tuple((each.cls, each.shards) for each in undivided(layout))


def _order(name: str, layout: Layout) -> tuple[bool, int]:
    """Return a pair that is highest for the plan of a group that is priced first: the most likely one to be chosen."""
    plain = not (is_request(name) and "state" in parse_request(name).flags)
    return plain, layout.shard_count(layout.storage.get("parameter", ()))


def _bound_us(priced: Iterable[Candidate], limit: float, most_us: float) -> float:
    """Return a step time that no further candidate may exceed: the search has enough that are faster.

    These are the fastest `KEPT_CANDIDATES`, and among those that fit the fastest `ASSIGNED_CANDIDATES`. If few fit, the
    bound leaves room for what another device assignment may gain. Without one that fits, there is no bound.
    """
    every = [(c.cost.step_time_us, c.fits(limit)) for c in priced]
    fastest = heapq.nsmallest(KEPT_CANDIDATES, (us for us, _ in every))
    fitting = heapq.nsmallest(ASSIGNED_CANDIDATES, (us for us, fits in every if fits))
    if not fitting:
        return math.inf
    if len(fastest) < KEPT_CANDIDATES:
        return most_us
    enough = fitting[-1] if len(fitting) == ASSIGNED_CANDIDATES else math.inf
    return min(most_us, max(fastest[-1], min(enough, fitting[0] * (1 + MOST_REASSIGNED_GAIN))))
