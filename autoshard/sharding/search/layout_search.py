"""Chooses a layout: the cheapest of the candidates that fits the memory.

    minimise   step_us(layout)            cost.CostModel
    subject to peak_bytes(layout) <= limit   memory.MemoryModel

Candidates are the known plans (`request.seeds`) for the number of devices, or, on a mesh whose axes are given, every
way to hand its axes to them; and what the best of them become when they are changed word by word (`improve`). Ties go
to the candidate that stands first; nothing depends on names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.fixed_shardings import FixedError
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import KINDS, Request, classes_for, layout_of, request
from autoshard.sharding.search.candidate import Candidate, SearchCounts, best_assigned, candidate_time, price
from autoshard.sharding.search.known_plans import seeds
from autoshard.sharding.search.local_search import WORTH, hill_climb

RELAID = 12  # how many of the fastest candidates have their mesh axes laid onto the topology anew
IDLE_MARGIN = 1.05  # how much faster a plan must be that leaves devices without work of their own


def search(
    axes: LogicalAxes,
    roles: Roles,
    cost: CostModel,
    memory: MemoryModel,
    devices: int,
    limit: float,
    mesh: Mapping[str, int] | None = None,
    pin: Callable[[list[tuple[str, Layout]]], list[tuple[str, Layout]]] = lambda layouts: layouts,
    tally: SearchCounts | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """The best layout, and all that were priced, best first.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        cost: prices time.
        memory: prices memory.
        devices: how many there are.
        limit: bytes of one device.
        mesh: mesh axis -> size if the mesh is given; it is never split further.
        pin: writes what the user fixed into the layouts, and gives back those in which it holds.
        tally: takes down how many were proposed and left out, and what the best were changed into.

    Returns:
        The candidate to use (if none fits, the one of the smallest peak) and every candidate.
    """
    layouts = pin(list(on_mesh(axes, roles, mesh) if mesh is not None else _from_seeds(axes, roles, devices)))
    proposed = len(layouts)
    layouts = [named for named in layouts if named[1].cuts()] or layouts  # all of the work everywhere is no plan
    cutting = len(layouts)
    if mesh is None:
        first: dict[Any, tuple[str, Layout]] = {}
        for name, layout in layouts:
            first.setdefault((layout.effect(), tuple(layout.fixed.items())), (name, layout))
        layouts = list(first.values())
    priced = _at_work([price(name, layout, cost, memory) for name, layout in layouts], limit)
    tally = tally or SearchCounts()
    tally.proposed, tally.alike = proposed, cutting - len(layouts)
    tally.idle = proposed - tally.alike - len(priced)

    def tried(name: str, layout: Layout) -> Candidate | None:
        try:
            useful = layout.cuts() and not layout.idle() and pin([(name, layout)])
        except FixedError:  # what is fixed cannot hold there
            return None
        if not useful:
            return None
        tally.changed.append(price(name, layout, cost, memory))
        return tally.changed[-1]

    known = sorted(priced, key=lambda c: (not c.fits(limit), candidate_time(c) if c.fits(limit) else c.peak_bytes))
    better = hill_climb(known, tried, limit)
    fitting = [c for c in [*priced, *better] if c.fits(limit)]
    if not fitting:
        priced += better
        return best_assigned(min(priced, key=lambda c: c.peak_bytes), cost), sorted(priced, key=candidate_time)
    again = {id(c): best_assigned(c, cost) for c in sorted(fitting, key=candidate_time)[:RELAID]}
    of_known = [again[id(c)] for c in known if id(c) in again]
    most = min(map(candidate_time, of_known)) * (1 - WORTH) if of_known else math.inf
    found = [again[id(c)] for c in better if id(c) in again and candidate_time(again[id(c)]) < most]
    return min([*found, *of_known], key=candidate_time), sorted(
        [*found, *(again.get(id(c), c) for c in priced)], key=candidate_time
    )


def idle_layouts(
    axes: LogicalAxes, roles: Roles, devices: int, mesh: Mapping[str, int] | None = None
) -> list[tuple[str, Layout]]:
    """The known plans that a search passes over: they leave a mesh axis without work of its own."""
    layouts = on_mesh(axes, roles, mesh) if mesh is not None else _from_seeds(axes, roles, devices)
    return [(name, layout) for name, layout in layouts if layout.idle()]


def _at_work(priced: list[Candidate], limit: float) -> list[Candidate]:
    """Without candidates that leave devices nothing of their own to do and are no faster for it than noise."""
    times = [c.cost.step_time_us for c in priced if c.fits(limit) and not c.layout.idle()]
    if not times:
        return priced
    return [c for c in priced if not c.layout.idle() or c.cost.step_time_us * IDLE_MARGIN < min(times)]


def _from_seeds(axes: LogicalAxes, roles: Roles, devices: int) -> Iterable[tuple[str, Layout]]:
    for asked in list(seeds(roles, devices)) or [request({"dp": devices})]:
        yield str(asked), layout_of(axes, roles, asked)


def on_mesh(axes: LogicalAxes, roles: Roles, mesh: Mapping[str, int]) -> Iterable[tuple[str, Layout]]:
    """Every way to give the axes of a named mesh to the kinds of parallelism that the program has."""
    useful = [k for k in KINDS if classes_for(k, roles, frozenset())] or ["dp"]
    for kinds in product(useful, repeat=len(mesh)):
        sequences = [[], ["seq"]] if "tp" in kinds and roles.sequence else [[]]
        for flags in [[*seq, *state] for seq in sequences for state in ([], ["state"])]:
            asked = Request(mesh, dict(zip(mesh, kinds, strict=True)), frozenset(flags), fixed_mesh=True)
            yield str(asked), layout_of(axes, roles, asked)
