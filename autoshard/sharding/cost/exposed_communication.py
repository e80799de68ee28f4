"""Communication that compute does not hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoshard.sharding.cost.collectives import StepCost


def exposed_us(cost: StepCost, hides: Sequence[str]) -> list[float]:
    """For each collective of a step the microseconds of it that compute does not hide."""
    able = [c.time_us if c.prefetchable and c.kind in hides else 0.0 for c in cost.collectives]
    hidden = cost.compute_us + cost.comm_us - cost.step_time_us
    part = hidden / sum(able) if sum(able) else 0.0
    return [max(c.time_us - mine * part, 0.0) for c, mine in zip(cost.collectives, able, strict=True)]


def traffic(cost: StepCost, hides: Sequence[str]) -> list[tuple[tuple[str, str, float, str], tuple[float, float]]]:
    """The collectives of a step as `Plan.traffic` and `Plan.traffic_us` have them: those of one line together."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c, waits in zip(cost.collectives, exposed_us(cost, hides), strict=True):
        sums = found[c.kind, " ".join(c.axes), c.line]
        sums[:] = sums[0] + c.wire_bytes * c.count, sums[1] + c.time_us, sums[2] + waits
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [((kind, axes, size, line), (us, waits)) for (kind, axes, line), (size, us, waits) in ranked]
