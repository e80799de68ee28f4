"""Communication that compute does not hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoshard.sharding.cost.collectives import StepCost


def exposed_us(cost: StepCost, hides: Sequence[str]) -> list[float]:
    """Return the exposed microseconds of each collective of a step.

    Args:
        cost: the cost of the step.
        hides: the kinds of collectives that the chip's compiler makes asynchronous.
    """
    hideable = [c.time_us if c.prefetchable and c.kind in hides else 0.0 for c in cost.collectives]
    hidden = cost.compute_us + cost.comm_us + cost.host.exposed_us - cost.step_time_us
    share = hidden / sum(hideable) if sum(hideable) else 0.0
    return [max(c.time_us - us * share, 0.0) for c, us in zip(cost.collectives, hideable, strict=True)]


def traffic(cost: StepCost, hides: Sequence[str]) -> list[tuple[tuple[str, str, float, str], tuple[float, float]]]:
    """Return the collectives of a step in the form of `Plan.traffic` and `Plan.traffic_us`.

    Collectives of one kind, one source line and the same mesh axes are added up.
    """
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c, exposed in zip(cost.collectives, exposed_us(cost, hides), strict=True):
        sums = found[c.kind, " ".join(c.axes), c.line]
        sums[:] = sums[0] + c.wire_bytes * c.count, sums[1] + c.time_us, sums[2] + exposed
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [((kind, axes, size, line), (us, exposed)) for (kind, axes, line), (size, us, exposed) in ranked]
