"""Over how many devices the optimizer's state is spread, independently of the parameters.

The known plans store the moments over the mesh axes that store parameters, over those of the batch, or over all. This
module varies that, for the best known plans. The devices of the batch are divided into three mesh axes. Of the inner
axes, the first few may store moments, too:

    dp:A zero1:B fsdp:C     A x B x C devices shard the batch; C store parameters, B x C store moments
    cp+optimizer            the devices of cp store moments, too; next, those of cp and ep; then those of all inner axes

More spreading saves memory. Less spreading can save time: a gradient is reduce-scattered over fewer devices, and the
updated parameter is gathered over fewer, at the price of an all-reduce of the shards over the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change
from autoshard.sharding.layout.plan_request import Request, layout_of, parse_request
from autoshard.sharding.search.candidate import Candidate, candidate_ranked_us
from autoshard.sharding.search.constants import LEAST_SPREAD_GAIN, SPREAD_STARTS

_BATCH = ("dp", "zero1", "fsdp")


def state_spreads(plan: Request, storing: Collection[str] = ()) -> Iterator[Request]:
    """All plans that differ from a known plan only in the devices that store state.

    Args:
        plan: the known plan.
        storing: mesh axes that store moments in any case, such as `pp` where the stages store parts of each layer.

    >>> [str(each) for each in state_spreads(parse_request("fsdp:4"))]
    ['dp:4', 'dp:2 zero1:2', 'zero1:4', 'dp:2 fsdp:2', 'zero1:2 fsdp:2', 'fsdp:4']
    """
    if plan.fixed_mesh or plan.changes or "state" in plan.flags:
        return
    inner = {axis: n for axis, n in plan.sizes.items() if axis not in _BATCH}
    count = plan.devices
    for n in inner.values():
        count //= n
    further = [axis for axis in inner if axis not in storing]
    prefixes = [(), *accumulate(((axis,) for axis in further), lambda one, other: one + other)]
    for fsdp in _divisors(count):
        for zero1 in _divisors(count // fsdp):
            batch = {"dp": count // fsdp // zero1, "zero1": zero1, "fsdp": fsdp}
            sizes = {axis: n for axis, n in batch.items() if n > 1} | inner
            for prefix in prefixes if sizes else []:
                changes = tuple(Change(axis, True, "optimizer") for axis in prefix)
                yield Request(sizes, {axis: axis for axis in sizes}, plan.flags, changes=changes)


def spread_better(
    known: Sequence[Candidate], price: Callable[[str, Layout, float], Candidate | None], limit: float
) -> list[Candidate]:
    """The plans with other spreads of state that gain enough over every known plan.

    Args:
        known: the known plans, best first.
        price: prices a layout with this strategy; returns None if the layout is not allowed, or certainly takes more
            than the given number of microseconds.
        limit: memory of one device, in bytes.
    """
    seen = {c.layout.sharding_key() for c in known}
    starts: dict[object, Candidate] = {}
    for c in known:
        starts.setdefault(_inner(c.name), c)
    best = known[0]
    most_us = _most_us(best) if best.fits(limit) else math.inf
    found = []
    for start in list(starts.values())[:SPREAD_STARTS]:
        for plan in state_spreads(parse_request(start.name), start.layout.storage.get("optimizer", ())):
            layout = layout_of(start.layout.axes, start.layout.roles, plan)
            if layout.sharding_key() in seen:
                continue
            seen.add(layout.sharding_key())
            candidate = price(str(plan), layout, most_us)
            if candidate is not None and _gains(candidate, best, limit):
                found.append(candidate)
    # Where an axis has nothing left to store, plans are alike.
    alike = {(candidate_ranked_us(c), c.peak_bytes): c for c in reversed(found)}
    return sorted(alike.values(), key=candidate_ranked_us)


def _gains(candidate: Candidate, best: Candidate, limit: float) -> bool:
    if candidate.fits(limit) != best.fits(limit):
        return candidate.fits(limit)
    if not best.fits(limit):
        return candidate.peak_bytes < best.peak_bytes
    return candidate_ranked_us(candidate) < _most_us(best)


def _most_us(best: Candidate) -> float:
    """The step time of a plan that gains just enough over the best known plan."""
    return candidate_ranked_us(best) * (1 - LEAST_SPREAD_GAIN)


def _inner(words: str) -> object:
    """Return the inner mesh axes and the flags of a plan: everything but how it shards the batch and stores state."""
    plan = parse_request(words)
    return tuple((a, n) for a, n in plan.sizes.items() if a not in _BATCH), plan.flags


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
