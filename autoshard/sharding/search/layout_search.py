"""Choose the fastest layout that fits the memory.

    minimise   step_us(layout)               cost.CostModel
    subject to peak_bytes(layout) <= limit   cost.MemoryModel

Candidates are the known plans for the number of devices (`known_plans`). On a given mesh, they are all assignments of
kinds of parallelism to its axes (`on_mesh`). Other rows than the batch may be spread over fewer devices (`row_spread`).
For plans that shard sequences, other ways of attention are tried (`sequence_ways`). The state of the best plans is
spread in other ways (`state_spread`), and the best are changed word by word (`local_search`). Ties go to the first
candidate. The names of axes and parameters do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import (
    CONTEXT,
    KINDS,
    Request,
    classes_for,
    kinds_of_replicas,
    layout_of,
    request,
)
from autoshard.sharding.search.candidate import (
    Candidate,
    SearchCounts,
    best_assigned,
    candidate_ranked_us,
    estimated_us,
    price,
)
from autoshard.sharding.search.constants import ASSIGNED_CANDIDATES, LEAST_GAIN_OVER_KNOWN, MOST_KIND_ERROR
from autoshard.sharding.search.known_plans import known_plans
from autoshard.sharding.search.local_search import hill_climb
from autoshard.sharding.search.pipeline_floors import check_in_time
from autoshard.sharding.search.row_spread import row_spreads
from autoshard.sharding.search.sequence_ways import sequence_ways
from autoshard.sharding.search.state_spread import spread_better
from autoshard.sharding.search.time_floors import price_promising


def search(
    axes: LogicalAxes,
    roles: Roles,
    cost: CostModel,
    memory: MemoryModel,
    devices: int,
    limit: float,
    mesh: Mapping[str, int] | None = None,
    pin: Callable[[list[tuple[str, Layout]]], list[tuple[str, Layout]]] = lambda layouts: layouts,
    counts: SearchCounts | None = None,
    most_us: float = math.inf,
    microbatches: int = 1,
    slow: set[str] | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """Search for the best layout.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        cost: prices time.
        memory: prices memory.
        devices: the number of devices.
        limit: memory of one device, in bytes.
        mesh: mesh axis -> size, if the mesh is given. It is never split.
        pin: writes the fixed shardings into layouts and returns those in which they are possible.
        counts: is filled with the counts of this search.
        most_us: an upper bound of the step time in microseconds. Slower plans need not be priced.
        microbatches: the number of microbatches.
        slow: see `check_in_time`.

    Returns:
        The best candidate, or the one with the smallest peak if none fits; and all candidates, fastest first.

    Raises:
        TooSlow: the program is a pipeline, and every plan of it takes more than `most_us` (`pipeline_floors`).
    """
    layouts = pin(list(on_mesh(axes, roles, mesh) if mesh is not None else _from_seeds(axes, roles, devices)))
    proposed = len(layouts)
    layouts = [named for named in layouts if named[1].sharded_classes()] or layouts  # drop those that shard nothing
    sharding_count = len(layouts)
    if mesh is None:
        layouts = distinct_layouts(layouts)
    if roles.stages is not None and math.isfinite(most_us):
        check_in_time(layouts, cost, microbatches, axes.sizes[roles.stages], most_us, set() if slow is None else slow)
    promising = price_promising(
        layouts, partial(price, cost=cost, memory=memory, limit=limit), cost.least_us, limit, most_us
    )
    priced = _without_idle(promising, limit)
    counts = counts or SearchCounts()
    counts.proposed, counts.duplicates = proposed, sharding_count - len(layouts)
    counts.slow = len(layouts) - len(promising)
    counts.idle = proposed - counts.duplicates - counts.slow - len(priced)

    def price_changed(name: str, layout: Layout, most_us: float = math.inf) -> Candidate | None:
        try:
            useful = layout.sharded_classes() and not layout.idle_axes() and pin([(name, layout)])
        except FixedError:  # fixed shardings are not possible there
            return None
        if not useful or (math.isfinite(most_us) and any(least_us > most_us for least_us in cost.least_us(layout))):
            return None
        counts.changed.append(price(name, layout, cost, memory, limit))
        return counts.changed[-1]

    def order(c: Candidate) -> tuple[bool, float]:
        return not c.fits(limit), candidate_ranked_us(c) if c.fits(limit) else c.peak_bytes

    known = sorted(priced, key=order)
    operators = [each.op for each in cost.classes]
    if ways := sequence_ways(known, price_changed, mesh, cost.target.link_prices, operators):
        priced = [*priced, *ways]
        known = sorted(priced, key=order)
    if mesh is None and (spread := spread_better(known, price_changed, limit)):
        priced = [*priced, *spread]
        known = sorted(priced, key=order)
    climbs = not known[0].fits(limit) or _may_gain(known, most_us)
    return _best_fitting(known, priced, hill_climb(known, price_changed, limit) if climbs else [], cost, limit)


def _may_gain(known: Sequence[Candidate], most_us: float) -> bool:
    """Whether a changed plan can gain enough to be chosen: no plan takes less time than the kernels of the leanest."""
    least_us = min(c.cost.kernels_us for c in known)
    return least_us < min(most_us, candidate_ranked_us(known[0]) * (1 - LEAST_GAIN_OVER_KNOWN))


def _best_fitting(
    known: Sequence[Candidate], priced: Sequence[Candidate], changed: Sequence[Candidate], cost: CostModel, limit: float
) -> tuple[Candidate, list[Candidate]]:
    """The best candidate that fits, or the one with the smallest peak if none fits; and the candidates, fastest first.

    If a plan fits, a changed plan is a candidate only if it gains enough over every known plan.

    Args:
        known: the known plans, best first.
        priced: the same plans, in the order in which they were proposed.
        changed: the plans that the local search made, best first.
        cost: prices time.
        limit: memory of one device, in bytes.
    """
    fitting = [c for c in [*priced, *changed] if c.fits(limit)]
    if not fitting:
        every = [*priced, *changed]
        return best_assigned(min(every, key=lambda c: c.peak_bytes), cost), sorted(every, key=estimated_us)
    assigned = {id(c): best_assigned(c, cost) for c in sorted(fitting, key=candidate_ranked_us)[:ASSIGNED_CANDIDATES]}
    of_known = [assigned[id(c)] for c in known if id(c) in assigned]
    most_us = min(map(candidate_ranked_us, of_known)) * (1 - LEAST_GAIN_OVER_KNOWN) if of_known else math.inf
    better = [assigned[id(c)] for c in changed if id(c) in assigned and candidate_ranked_us(assigned[id(c)]) < most_us]
    return min([*better, *of_known], key=candidate_ranked_us), sorted(
        [*better, *(assigned.get(id(c), c) for c in priced)], key=estimated_us
    )


def idle_layouts(
    axes: LogicalAxes, roles: Roles, devices: int, mesh: Mapping[str, int] | None = None
) -> list[tuple[str, Layout]]:
    """The known plans in which a mesh axis is idle: it shards no work."""
    layouts = on_mesh(axes, roles, mesh) if mesh is not None else _from_seeds(axes, roles, devices)
    return [(name, layout) for name, layout in layouts if layout.idle_axes()]


def _without_idle(priced: list[Candidate], limit: float) -> list[Candidate]:
    """Drop the candidates with an idle mesh axis that are not clearly faster than the best one without.

    Clearly means by more than `MOST_KIND_ERROR`, the error of the estimated ratio of two plans in 9 of 10 cases.
    """
    times = [candidate_ranked_us(c) for c in priced if c.fits(limit) and not c.layout.idle_axes()]
    if not times:
        return priced
    most_us = min(times) / (1 + MOST_KIND_ERROR)
    return [c for c in priced if not c.layout.idle_axes() or candidate_ranked_us(c) < most_us]


def distinct_layouts(layouts: Iterable[tuple[str, Layout]]) -> list[tuple[str, Layout]]:
    """Return the layouts without those that shard like an earlier one."""
    first: dict[Any, tuple[str, Layout]] = {}
    for name, layout in layouts:
        first.setdefault((layout.sharding_key(), tuple(layout.fixed.items())), (name, layout))
    return list(first.values())


def _from_seeds(axes: LogicalAxes, roles: Roles, devices: int) -> Iterable[tuple[str, Layout]]:
    stages = 1 if roles.stages is None else axes.sizes[roles.stages]
    replicas = 1 if roles.replicas is None else axes.sizes[roles.replicas]
    known = list(known_plans(roles, devices, stages, replicas)) or [request({"dp": devices})]
    varied = [other for plan in known for other in row_spreads(axes, roles, plan)]
    for plan in [*known, *varied]:
        yield str(plan), layout_of(axes, roles, plan)


def on_mesh(axes: LogicalAxes, roles: Roles, mesh: Mapping[str, int]) -> Iterable[tuple[str, Layout]]:
    """The layouts of all assignments to a mesh's axes of the kinds of parallelism that the program can use."""
    others = [k for k in KINDS if k not in CONTEXT or k == "cp"]  # `sequence_ways` tries the other ways of cp
    useful = [k for k in others if classes_for(k, roles, frozenset())] or ["dp"]
    for kinds in product(useful, repeat=len(mesh)):
        of_stages = [n for kind, n in zip(kinds, mesh.values(), strict=True) if kind == "pp"]
        if of_stages != ([] if roles.stages is None else [axes.sizes[roles.stages]]):
            continue
        apart = math.prod(n for kind, n in zip(kinds, mesh.values(), strict=True) if kind in kinds_of_replicas(roles))
        if roles.replicas is not None and apart != axes.sizes[roles.replicas]:
            continue
        sequences = [[], ["seq"]] if "tp" in kinds and roles.sequence else [[]]
        for flags in [[*seq, *state] for seq in sequences for state in ([], ["state"])]:
            plan = Request(mesh, dict(zip(mesh, kinds, strict=True)), frozenset(flags), fixed_mesh=True)
            for one in (plan, *row_spreads(axes, roles, plan)):
                yield str(one), layout_of(axes, roles, one)
