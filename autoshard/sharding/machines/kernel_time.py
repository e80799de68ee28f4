"""The time of an operator with a declared cost on a chip."""

from __future__ import annotations

from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost


def declared_us(cost: KernelCost, chip: Chip) -> float:
    """Return the microseconds of an operator with a declared cost.

    Its matrix products, its vector operations and its memory traffic overlap, so the slowest of them counts.
    """
    times = (
        cost.flops / (chip.reached(cost.itemsize) * cost.efficiency),
        cost.vector_ops / chip.vector_ops if chip.vector_ops else 0.0,
        cost.moved_bytes / (chip.memory_bandwidth * BANDWIDTH_REACHED),
    )
    return max(times) * 1e6 + cost.overhead_us
