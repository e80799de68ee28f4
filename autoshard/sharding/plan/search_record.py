"""How a plan was found: what was priced for each variant of the program, and what decided.

A plan waits for a collective as long as compute does not hide it: of all that could be hidden (parameters and
gradients, of the kinds that the chip's compiler makes asynchronous) every collective is hidden by the same part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autoshard._shown import shown

if TYPE_CHECKING:
    from autoshard.sharding.cost.step_time import StepCost
    from autoshard.sharding.plan.sharding_plan import Plan
    from autoshard.sharding.search.layout_search import Candidate


@shown
@dataclass(frozen=True)
class Tried:
    """A plan that was priced.

    Attributes:
        words: what it is called.
        step_time_us: microseconds of a step.
        peak_bytes: bytes on one device at the worst moment.
        compute_us: microseconds of compute.
        waits_for: the kind of collective that it waits for longest, empty if for none.
        waits_us: microseconds that it waits for that kind.
        changed: whether it is a known plan changed by words (`improve`), not one of those that were proposed.
    """

    words: str
    step_time_us: float
    peak_bytes: float
    compute_us: float = 0.0
    waits_for: str = ""
    waits_us: float = 0.0
    changed: bool = False


@dataclass(eq=False)
class Tally:
    """What a search notes while it goes on: see `Searched`; `changed` are the candidates that `improve` had priced."""

    proposed: int = 0
    alike: int = 0
    idle: int = 0
    changed: list[Candidate] = field(default_factory=list)


@shown
@dataclass(frozen=True)
class Searched:
    """The plans of one variant of the program.

    Attributes:
        variant: its static keywords, empty where there are no variants.
        proposed: the plans that the search began with.
        alike: those of them that lay everything out as an earlier one does.
        idle: those that leave devices without work of their own and are not enough faster for it.
        tried: those that were priced, the fastest first, and the best of them changed word by word.
    """

    variant: Mapping[str, Any] = field(default_factory=dict)
    proposed: int = 0
    alike: int = 0
    idle: int = 0
    tried: tuple[Tried, ...] = ()


def waits_us(cost: StepCost, hides: Sequence[str]) -> list[float]:
    """For each collective of a step the microseconds of it that compute does not hide."""
    able = [c.time_us if c.ahead and c.kind in hides else 0.0 for c in cost.collectives]
    hidden = cost.compute_us + cost.comm_us - cost.step_time_us
    part = hidden / sum(able) if sum(able) else 0.0
    return [max(c.time_us - mine * part, 0.0) for c, mine in zip(cost.collectives, able, strict=True)]


def traffic(cost: StepCost, hides: Sequence[str]) -> list[tuple[tuple[str, str, float, str], tuple[float, float]]]:
    """The collectives of a step as `Plan.traffic` and `Plan.traffic_us` have them: those of one line together."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c, waits in zip(cost.collectives, waits_us(cost, hides), strict=True):
        sums = found[c.kind, " ".join(c.axes), c.line]
        sums[:] = sums[0] + c.wire_bytes * c.count, sums[1] + c.time_us, sums[2] + waits
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [((kind, axes, size, line), (us, waits)) for (kind, axes, line), (size, us, waits) in ranked]


def searched(priced: Sequence[Candidate], tally: Tally, hides: Sequence[str]) -> Searched:
    """The record of one search.

    Args:
        priced: the candidates, the fastest first.
        tally: what the search noted.
        hides: the kinds of collectives that run beside compute.
    """
    changed = {id(c.layout) for c in tally.changed}
    kept = {id(c.layout) for c in priced}  # of what was changed only the best is a candidate
    rows = [*priced, *(c for c in tally.changed if id(c.layout) not in kept)]
    tried = sorted((_tried(c, hides, id(c.layout) in changed) for c in rows), key=lambda t: t.step_time_us)
    return Searched({}, tally.proposed or len(priced), tally.alike, tally.idle, tuple(tried))


def _tried(candidate: Candidate, hides: Sequence[str], changed: bool) -> Tried:
    cost, by_kind = candidate.cost, defaultdict(float)
    for c, us in zip(cost.collectives, waits_us(cost, hides), strict=True):
        by_kind[c.kind] += us
    kind = max(sorted(by_kind), key=lambda k: by_kind[k], default="")
    return Tried(candidate.name, cost.step_time_us, candidate.peak_bytes, cost.compute_us,
                 kind if by_kind[kind] else "", by_kind[kind], changed)  # fmt: skip


def of_variants(made: Sequence[tuple[Mapping[str, Any], Plan]]) -> tuple[Searched, ...]:
    """The searches of all variants, each under its keywords."""
    return tuple(replace(each, variant=dict(variant)) for variant, plan in made for each in plan.history)
