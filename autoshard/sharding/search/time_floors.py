"""Prices known plans, except those that are too slow in any case.

Known plans that have the same inner mesh axes (`cp`, `ep`, `tp`) form a group. They differ in how they shard the batch
over the other devices and in how they store state, but each device has the same rows and the same part of the weights.
So the kernels and the collectives of their activations take the same time; those of the optimizer do not. One plan of
each group is priced first. The kernels and collectives of its activations (`StepCost.rows_us`) are the least time that
any plan of the group takes. The groups are then priced in the order of this time, until no later group can contain one
of the fastest plans.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from autoshard.sharding.layout.divisibility import undivided
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import CONTEXT, is_request, parse_request
from autoshard.sharding.search.candidate import Candidate
from autoshard.sharding.search.constants import ASSIGNED_CANDIDATES, FLOOR_ERROR, KEPT_CANDIDATES, MOST_REASSIGNED_GAIN

BATCH_KINDS = ("dp", "zero1", "fsdp")


def price_promising(
    layouts: Sequence[tuple[str, Layout]], price: Callable[[str, Layout], Candidate], limit: float, most_us: float
) -> list[Candidate]:
    """Price known plans. Leave out those that are slower than enough others, or slower than `most_us`, in any case.

    Args:
        layouts: the known plans, as (strategy, layout).
        price: prices one of them.
        limit: memory of one device, in bytes.
        most_us: an upper bound of the step time in microseconds. Slower plans are not needed.

    Returns:
        The candidates, in the order of `layouts`.
    """
    groups = groups_of(layouts)
    priced: dict[int, Candidate] = {}

    def price_all(numbers: Iterable[int]) -> None:
        priced.update((n, price(*layouts[n])) for n in numbers if n not in priced)

    floors: list[tuple[float, list[int]]] = []
    for members in groups:
        price_all(members[:1])
        floors.append((priced[members[0]].cost.rows_us * (1 - FLOOR_ERROR), members))
    for floor_us, members in sorted(floors, key=lambda each: each[0]):
        if floor_us > _bound_us(priced.values(), limit, most_us):
            break
        price_all(members)
    return [priced[n] for n in sorted(priced)]


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
