"""The collectives of a step, by kind, mesh axes and source line."""

from __future__ import annotations

from collections import defaultdict

from autoshard.sharding.cost.collectives import StepCost


def traffic(cost: StepCost) -> list[tuple[tuple[str, str, float, str], tuple[float, float]]]:
    """Return the collectives of a step in the form of `Plan.traffic` and `Plan.traffic_us`.

    Collectives of one kind, one source line and the same mesh axes are added up.
    """
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c in cost.collectives:
        sums = found[c.kind, " ".join(c.axes), c.line]
        sums[:] = sums[0] + c.wire_bytes * c.count, sums[1] + c.time_us, sums[2] + c.exposed_us
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [((kind, axes, size, line), (us, exposed)) for (kind, axes, line), (size, us, exposed) in ranked]
