"""Search beyond the known plans: the best of them, changed by one word at a time while that pays.

A word is a mesh axis with what it cuts besides, or does not (`request.Change`):

    tp-ffn                          tp leaves the hidden units of MLPs whole (with `seq` it cuts their sequence)
    dp+vocab                        dp cuts the vocabulary, too, in tensors that have nothing that comes first
    dp+optimizer, fsdp-parameter    this part of the state is stored over a mesh axis, or not

From each start the best change is made until none saves `STEP` of the time (of the memory, where nothing fits). None
may save traffic by repeating work, nor gain by sending more and having it hidden (`LONGER`): compilers hide less of
it in programs that nobody writes (Llama-2 70B on v5p:8x8x4, batch 64: `fsdp:64 tp:4 seq` with `tp-ffn` is 6 % faster by
the estimate, and 15 % slower compiled). What is found has to save `WORTH` against every known plan, more than by which
an estimate errs between two plans (Llama-3 8B on v5e:16x16: 2.5 % faster by the estimate, 1 % slower compiled; Llama-2
70B, batch 256, a plan ten words away: 6 % faster by the estimate, and more than twice as slow compiled).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from autoshard.sharding.axes.roles import STATE
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change, changed
from autoshard.sharding.search.candidate import Candidate

STARTS = 2  # of the best known plans, each on a mesh of its own
STEP = 2e-3
WORTH = 0.15
LONGER = 1.05  # how much more compute and traffic (its time, its bytes) than its start a plan may have


def hill_climb(
    known: Sequence[Candidate], price: Callable[[str, Layout], Candidate | None], limit: float
) -> list[Candidate]:
    """What is better than every known plan, best first.

    Args:
        known: the known plans, best first.
        price: what a layout of this name costs; None of one that may not be.
        limit: bytes of one device.
    """
    seen = {_effect(c.layout) for c in known}
    first: dict[tuple[tuple[str, int], ...], Candidate] = {}
    for c in known:
        first.setdefault(tuple(c.layout.mesh.items()), c)
    found = []
    for start in list(first.values())[:STARTS]:
        now = start
        most = [LONGER * each for each in _spent(start)]
        while (better := _best_change(now, price, limit, most, seen)) is not None:
            now = better
        found += [now] if _saves(now, known[0], limit, WORTH) else []
    return sorted(found, key=lambda c: _worth(c, limit))


def _best_change(
    now: Candidate,
    price: Callable[[str, Layout], Candidate | None],
    limit: float,
    most: Sequence[float],
    seen: set[object],
) -> Candidate | None:
    """The best of all single changes; None where none saves anything. `seen` are layouts that need no second look."""
    tried = []
    for change in changes(now.layout):
        layout = changed(now.layout, change)
        effect = _effect(layout)
        if effect not in seen:
            seen.add(effect)
            tried += [c for c in [price(f"{now.name} {change}", layout)] if c is not None]
    tried = [c for c in tried if all(mine <= limit for mine, limit in zip(_spent(c), most, strict=True))]
    best = min(tried, key=lambda c: _worth(c, limit), default=now)
    return best if _saves(best, now, limit, STEP) else None


def _spent(candidate: Candidate) -> tuple[float, float, float]:
    """What a plan may hardly do more of than its start."""
    return candidate.cost.compute_us, candidate.cost.comm_us, candidate.cost.comm_bytes


def changes(layout: Layout) -> Iterator[Change]:
    """Every word more or less that a layout can be changed by."""
    roles = layout.roles
    classes = [c for c in _listed(roles.batch, *roles.parallel, *roles.experts, *roles.sequence, roles.residual)]
    for axis, size in layout.mesh.items():
        if size == 1:
            continue
        for c in classes:
            yield Change(axis, c not in layout.table.get(axis, ()), layout.axes.name(c))
        for role in STATE:
            yield Change(axis, axis not in layout.storage.get(role, ()), role)


def _listed(*classes: int | None) -> Iterable[int]:
    return dict.fromkeys(c for c in classes if c is not None)


def _effect(layout: Layout) -> object:
    return tuple(layout.mesh.items()), layout.effect(), tuple(layout.fixed.items())


def _worth(candidate: Candidate, limit: float) -> tuple[bool, float]:
    """What to make small: the memory while it does not fit, then the time."""
    fits = candidate.fits(limit)
    return not fits, round(candidate.cost.step_time_us, 3) if fits else candidate.peak_bytes


def _saves(one: Candidate, other: Candidate, limit: float, part: float) -> bool:
    (misfit, mine), (before, yours) = _worth(one, limit), _worth(other, limit)
    return misfit < before or (misfit == before and mine < yours * (1 - part))
