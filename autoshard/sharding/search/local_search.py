"""Search beyond the known plans: change the best of them by one word at a time, while that pays.

A word adds something to a mesh axis or removes it (`plan_edits.Change`):

    tp-ffn                          tp does not shard the hidden units of MLPs (with `seq` it shards their sequence)
    dp+vocab                        dp also shards the vocabulary, in tensors without an earlier logical axis of dp
    dp+optimizer, fsdp-parameter    a mesh axis stores this part of the state, or does not

From each start, the best change is made until none gains enough (`LEAST_CHANGE_GAIN`), or until the gains of all
changes together are too small (`GAINS_TOGETHER`). The gain is in time, or in memory while the plan does not fit. Then
the changes that were made are tried on every other mesh, because a mesh can be slow only for want of them:

    dp:2 ep:8 1.76 ms    -> dp:2 ep:8 ep-batch 1.57 ms
    ep:16     2.28 ms    -> ep:16 ep-batch     1.39 ms, and the search goes on from here

A changed plan may compute and communicate only a little more than its start (`MOST_EXTRA_WORK`). So it cannot repeat
work to save communication, or send more and rely on overlap. It must gain `LEAST_GAIN_OVER_KNOWN` over every known
plan. The comments of these constants give the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from autoshard._shown import shown
from autoshard.errors import PlanRequestError
from autoshard.sharding.axes.logical_axes import Leaves
from autoshard.sharding.axes.roles import STATE
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change, changed
from autoshard.sharding.search.candidate import Candidate, candidate_ranked_us
from autoshard.sharding.search.constants import (
    CLIMB_STARTS,
    GAINS_TOGETHER,
    LEAST_CHANGE_GAIN,
    LEAST_GAIN_OVER_KNOWN,
    MOST_EXTRA_WORK,
)
from autoshard.spmdrules.core.placement import Spec

Price = Callable[[str, Layout, float], Candidate | None]
"""Prices a layout with this strategy.

Returns None if the layout is not allowed, or certainly takes more than the given number of microseconds.
"""


@shown
@dataclass(frozen=True)
class _Position:
    """Where a search is: a known plan, the changes that were made to it, and the plan that they give."""

    start: Candidate
    changes: tuple[Change, ...]
    now: Candidate


def hill_climb(known: Sequence[Candidate], price: Price, limit: float) -> list[Candidate]:
    """Changed plans that are better than every known plan, best first.

    Args:
        known: the known plans, best first.
        price: prices a layout.
        limit: memory of one device, in bytes.
    """
    seen = {_key(c.layout) for c in known}
    best_of_mesh: dict[tuple[tuple[str, int], ...], Candidate] = {}
    for c in known:
        best_of_mesh.setdefault(tuple(c.layout.mesh.items()), c)
    starts, better = list(best_of_mesh.values()), []
    for start in starts[:CLIMB_STARTS]:
        here = _climbed(_Position(start, (), start), known[0], price, limit, seen)
        while tried := _on_other_meshes(here, starts, price, limit, seen):
            here = _climbed(_best(tried, limit), known[0], price, limit, seen)
        better += [here.now] if _gains(here.now, known[0], limit, LEAST_GAIN_OVER_KNOWN) else []
    return sorted(better, key=lambda c: _objective(c, limit))


def _climbed(here: _Position, known: Candidate, price: Price, limit: float, seen: set[object]) -> _Position:
    """Make the best single change until the changes gain too little over the best known plan."""
    while (tried := _changed_once(here, price, limit, seen)) and _may_pay(tried, here.now, known, limit):
        here = _best(tried, limit)
    return here


def _changed_once(here: _Position, price: Price, limit: float, seen: set[object]) -> list[_Position]:
    """The plans with one more change that gain enough.

    Args:
        here: the plan to change.
        price: prices a layout.
        limit: memory of one device, in bytes.
        seen: keys of layouts that were tried; is extended.
    """
    tried, now = [], here.now
    specs, most_us = specs_of_values(now.layout), _most_us(now, limit)
    for change in single_changes(now.layout):
        layout = changed(now.layout, change)
        key = _key(layout)
        if key not in seen:
            seen.add(key)
            if not shards_alike(now.layout, layout, specs):
                candidate = price(f"{now.name} {change}", layout, most_us)
                tried += [_Position(here.start, (*here.changes, change), candidate)] if candidate is not None else []
    return [each for each in tried if _is_step(each, now, limit)]


def _on_other_meshes(
    here: _Position, starts: Sequence[Candidate], price: Price, limit: float, seen: set[object]
) -> list[_Position]:
    """The plans of other meshes with the same changes that gain enough, for each mesh on which they are possible.

    Args:
        here: the changed plan.
        starts: the best known plan of each mesh.
        price: prices a layout.
        limit: memory of one device, in bytes.
        seen: keys of layouts that were tried; is extended.
    """
    tried, now = [], here.now
    most_us = _most_us(now, limit)
    for start in starts if here.changes else []:
        layout = _changed_alike(start.layout, here.changes)
        if layout is None or layout.mesh == now.layout.mesh or _key(layout) in seen:
            continue
        seen.add(_key(layout))
        candidate = price(" ".join([start.name, *map(str, here.changes)]), layout, most_us)
        tried += [_Position(start, here.changes, candidate)] if candidate is not None else []
    return [each for each in tried if _is_step(each, now, limit)]


def _changed_alike(layout: Layout, changes: Iterable[Change]) -> Layout | None:
    """The layout after these changes; None if one is not possible or changes nothing there."""
    try:
        return reduce(changed, changes, layout)
    except PlanRequestError:
        return None


def _is_step(to: _Position, now: Candidate, limit: float) -> bool:
    """Whether a plan gains enough over the present one, and does not do much more work than its own start."""
    work = zip(_work(to.now), _work(to.start), strict=True)
    return all(one <= MOST_EXTRA_WORK * other for one, other in work) and _gains(to.now, now, limit, LEAST_CHANGE_GAIN)


def _most_us(now: Candidate, limit: float) -> float:
    """The step time of a plan that gains just enough over the present one."""
    return candidate_ranked_us(now) * (1 - LEAST_CHANGE_GAIN) if now.fits(limit) else math.inf


def _best(positions: Iterable[_Position], limit: float) -> _Position:
    return min(positions, key=lambda each: _objective(each.now, limit))


def specs_of_values(priced: Layout) -> dict[Leaves, Spec]:
    """The specs of all values whose shardings the price of a layout depends on, by their logical axes."""
    return {leaves: priced.known_specs[leaves] for leaves in {*priced.axes.of_value} & priced.known_specs.keys()}


def shards_alike(priced: Layout, other: Layout, specs: Mapping[Leaves, Spec]) -> bool:
    """Return whether another layout shards all values like a priced layout. Then both have the same price.

    The other shardings follow from these specs, from the storage and from the mesh axes of the batch.

    Args:
        priced: the layout that was priced.
        other: the other layout.
        specs: `specs_of_values(priced)`.
    """
    same = (priced.mesh, priced.storage, priced.sequence) == (other.mesh, other.storage, other.sequence)
    if priced.fixed or not same:
        return False
    of_batch = ([a for a in each.mesh if each.roles.batch in each.table.get(a, ())] for each in (priced, other))
    return next(of_batch) == next(of_batch) and all(other.spec_of(leaves) == spec for leaves, spec in specs.items())


def _may_pay(better: Sequence[_Position], now: Candidate, known: Candidate, limit: float) -> bool:
    """Return whether the sum of the changes' gains, times `GAINS_TOGETHER`, is enough over the best known plan."""
    if not (now.fits(limit) and known.fits(limit)):
        return True
    gain = sum(candidate_ranked_us(now) - candidate_ranked_us(each.now) for each in better)
    return candidate_ranked_us(now) - GAINS_TOGETHER * gain < candidate_ranked_us(known) * (1 - LEAST_GAIN_OVER_KNOWN)


def _work(candidate: Candidate) -> tuple[float, float, float]:
    """The quantities that `MOST_EXTRA_WORK` limits: compute time, communication time, bytes sent."""
    return candidate.cost.compute_us, candidate.cost.comm_us, candidate.cost.comm_bytes


def single_changes(layout: Layout) -> Iterator[Change]:
    """All single changes of a layout."""
    roles = layout.roles
    classes = _distinct(roles.batch, *roles.parallel, *roles.experts, *roles.routers, *roles.sequence, roles.residual)
    for axis, size in layout.mesh.items():
        if size == 1:
            continue
        for c in classes:
            yield Change(axis, c not in layout.table.get(axis, ()), layout.axes.name(c))
        for role in STATE:
            yield Change(axis, axis not in layout.storage.get(role, ()), role)


def _distinct(*classes: int | None) -> Iterable[int]:
    return dict.fromkeys(c for c in classes if c is not None)


def _key(layout: Layout) -> object:
    return tuple(layout.mesh.items()), layout.sharding_key(), tuple(layout.fixed.items())


def _objective(candidate: Candidate, limit: float) -> tuple[bool, float]:
    """What the search minimises: peak memory while a plan does not fit, then time."""
    fits = candidate.fits(limit)
    return not fits, candidate_ranked_us(candidate) if fits else candidate.peak_bytes


def _gains(one: Candidate, other: Candidate, limit: float, share: float) -> bool:
    """Whether one plan is better than another by at least this share."""
    (one_exceeds, one_value), (other_exceeds, other_value) = _objective(one, limit), _objective(other, limit)
    return one_exceeds < other_exceeds or (one_exceeds == other_exceeds and one_value < other_value * (1 - share))
