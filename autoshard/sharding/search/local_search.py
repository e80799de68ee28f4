"""Search beyond the known plans: change the best of them by one word at a time, while that pays.

A word adds something to a mesh axis or removes it (`plan_edits.Change`):

    tp-ffn                          tp does not shard the hidden units of MLPs (with `seq` it shards their sequence)
    dp+vocab                        dp also shards the vocabulary, in tensors without an earlier logical axis of dp
    dp+optimizer, fsdp-parameter    a mesh axis stores this part of the state, or does not

From each start, the best change is made until none gains enough (`LEAST_CHANGE_GAIN`), or until the gains of all
changes together are too small (`GAINS_TOGETHER`). The gain is in time, or in memory while the plan does not fit. A
changed plan may compute and communicate only a little more than its start (`MOST_EXTRA_WORK`). So it cannot repeat work
to save communication, or send more and rely on overlap. It must gain `LEAST_GAIN_OVER_KNOWN` over every known plan. The
comments of these constants give the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autoshard.sharding.axes.logical_axes import Leaves
from autoshard.sharding.axes.roles import STATE
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change, changed
from autoshard.sharding.search.candidate import Candidate, candidate_time
from autoshard.sharding.search.constants import (
    CLIMB_STARTS,
    GAINS_TOGETHER,
    LEAST_CHANGE_GAIN,
    LEAST_GAIN_OVER_KNOWN,
    MOST_EXTRA_WORK,
)
from autoshard.spmdrules.core.placement import Spec


def hill_climb(
    known: Sequence[Candidate], price: Callable[[str, Layout], Candidate | None], limit: float
) -> list[Candidate]:
    """Changed plans that are better than every known plan, best first.

    Args:
        known: the known plans, best first.
        price: prices a layout with this strategy; returns None if the layout is not allowed.
        limit: memory of one device, in bytes.
    """
    seen = {_key(c.layout) for c in known}
    best_of_mesh: dict[tuple[tuple[str, int], ...], Candidate] = {}
    for c in known:
        best_of_mesh.setdefault(tuple(c.layout.mesh.items()), c)
    better = []
    for start in list(best_of_mesh.values())[:CLIMB_STARTS]:
        now = start
        most = [MOST_EXTRA_WORK * each for each in _work(start)]
        while (tried := _changes(now, price, limit, most, seen)) and _may_pay(tried, now, known[0], limit):
            now = min(tried, key=lambda c: _objective(c, limit))
        better += [now] if _gains(now, known[0], limit, LEAST_GAIN_OVER_KNOWN) else []
    return sorted(better, key=lambda c: _objective(c, limit))


def _changes(
    now: Candidate,
    price: Callable[[str, Layout], Candidate | None],
    limit: float,
    most: Sequence[float],
    seen: set[object],
) -> list[Candidate]:
    """The plans with a single change that gain enough.

    Args:
        now: the plan to change.
        price: see `hill_climb`.
        limit: memory of one device, in bytes.
        most: upper bounds of `_work`.
        seen: keys of layouts that were tried; is extended.
    """
    tried = []
    specs = specs_of_values(now.layout)
    for change in single_changes(now.layout):
        layout = changed(now.layout, change)
        key = _key(layout)
        if key not in seen:
            seen.add(key)
            if not shards_alike(now.layout, layout, specs):
                tried += [c for c in [price(f"{now.name} {change}", layout)] if c is not None]
    allowed = [c for c in tried if all(work <= bound for work, bound in zip(_work(c), most, strict=True))]
    return [c for c in allowed if _gains(c, now, limit, LEAST_CHANGE_GAIN)]


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


def _may_pay(better: Sequence[Candidate], now: Candidate, known: Candidate, limit: float) -> bool:
    """Return whether the sum of the changes' gains, times `GAINS_TOGETHER`, is enough over the best known plan."""
    if not (now.fits(limit) and known.fits(limit)):
        return True
    gain = sum(candidate_time(now) - candidate_time(c) for c in better)
    return candidate_time(now) - GAINS_TOGETHER * gain < candidate_time(known) * (1 - LEAST_GAIN_OVER_KNOWN)


def _work(candidate: Candidate) -> tuple[float, float, float]:
    """The quantities that `MOST_EXTRA_WORK` limits: compute time, communication time, bytes sent."""
    return candidate.cost.compute_us, candidate.cost.comm_us, candidate.cost.comm_bytes


def single_changes(layout: Layout) -> Iterator[Change]:
    """All single changes of a layout."""
    roles = layout.roles
    classes = _distinct(roles.batch, *roles.parallel, *roles.experts, *roles.sequence, roles.residual)
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
    return not fits, candidate_time(candidate) if fits else candidate.peak_bytes


def _gains(one: Candidate, other: Candidate, limit: float, share: float) -> bool:
    """Whether one plan is better than another by at least this share."""
    (one_exceeds, one_value), (other_exceeds, other_value) = _objective(one, limit), _objective(other, limit)
    return one_exceeds < other_exceeds or (one_exceeds == other_exceeds and one_value < other_value * (1 - share))
