"""Ranks plans by their time, with a penalty for plans that may need more memory than a program can use.

If a program needs more memory than it can use, XLA rematerializes values and hides fewer gathers, or it fails. XLA:TPU
starts to rematerialize at `USABLE_SHARE` of the device's memory. The estimate of the peak memory also has an error. So
plans are ranked by

    ranked time = estimated time * (1 + SLOWDOWN_WITHOUT_MEMORY * doubt)

`doubt` is the probability that the peak of the compiled program exceeds the usable memory. All errors up to
`MEMORY_ERROR` are assumed to be equally likely. So `doubt` is 0.5 if the estimated peak equals the usable memory, and 0
if it is at least 5 % smaller.

Each row compares a plan that almost fills the memory with a plan that does not. Compiled with libtpu 0.0.42.1, joined
measure of `benchmarks/estimate.py` (GPT: `benchmarks/ranked_plans.py`):

    program                           share of the memory   estimated seconds   compiled seconds
    Mistral 7B, v6e:2x4, fsdp:8       0.95, 0.73            6.31, 6.31          5.40, 4.87
    GPT 2.6B, v5e:4x4, dp:2 fsdp:8    0.95, 0.87            4.51, 4.59          5.93, 4.65
"""

from __future__ import annotations

import math

from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.plan.sharding_plan import ShardingPlan

# Relative error of the estimated peak memory. Source: chosen. It is the bar that `benchmarks/peak_memory.py` holds the
# estimate to, not the measured tail of the errors, which is longer (`MOST_MEMORY_ERROR`).
MEMORY_ERROR = 0.05

# The share of a TPU's memory that a program can use before XLA rematerializes. Source: `benchmarks/memory_pressure.py`
# on v5e, by the joined measure. The step `host` takes the same time for all planned shares up to 0.95, and 33 % longer
# at 0.96. The step `full-memory` takes 14 % longer at 0.95 than at 0.93.
USABLE_SHARE = 0.95

# The relative slowdown of a step that needs more memory than it can use. Source: chosen. In
# `benchmarks/memory_pressure.py`, the two largest shares of each variant are slower by 0.05 to 0.28 by the roofline
# (mean 0.14), and by -0.04 to 0.33 by the joined measure (mean 0.11).
SLOWDOWN_WITHOUT_MEMORY = 0.16


def usable_bytes(limit: float, chip: Chip) -> float:
    """Return how much of a device's memory a program can use without a slowdown, in bytes.

    On a TPU, this is the limit or `USABLE_SHARE` of the memory, whichever is smaller. Elsewhere, it is the limit.

    Args:
        limit: the bytes that a plan may take on one device; infinite if there is no limit.
        chip: the chip.

    >>> from autoshard.sharding.machines.chips import CHIPS
    >>> cases = (15.75, "v5e"), (1.0, "v5e"), (70.0, "h100")
    >>> [round(usable_bytes(gib * 2**30, CHIPS[name]) / 2**30, 2) for gib, name in cases]
    [14.96, 1.0, 70.0]
    """
    if chip.platform != "tpu" or math.isinf(limit) or not chip.memory_bytes:
        return limit
    return min(limit, USABLE_SHARE * chip.memory_bytes)


def ranked_us(time_us: float, peak_bytes: float, usable: float) -> float:
    """Return the time by which a plan is ranked, in the unit of `time_us`.

    Args:
        time_us: its estimated step time.
        peak_bytes: its estimated peak memory.
        usable: the memory that its program can use (`usable_bytes`); infinite if there is no limit.

    >>> [round(ranked_us(100.0, peak, 100.0), 1) for peak in (80.0, 95.0, 97.5, 100.0, 105.0)]
    [100.0, 100.0, 104.0, 108.0, 116.0]
    """
    return time_us * (1 + SLOWDOWN_WITHOUT_MEMORY * _doubt(peak_bytes, usable))


def usable_bytes_of(plan: ShardingPlan) -> float:
    """Return the memory that a plan's program can use, in bytes. Plans of older versions have only a limit."""
    return plan.usable_bytes or plan.limit_bytes or math.inf


def plan_ranked_us(plan: ShardingPlan) -> float:
    """Return the time in microseconds by which a plan is ranked, see `ranked_us`."""
    return ranked_us(plan.estimate.step_time_us, plan.estimate.peak_memory_bytes, usable_bytes_of(plan))


def almost_fills(peak_bytes: float, usable: float) -> bool:
    """Whether a plan's program may need more memory than it can use.

    >>> [almost_fills(peak, 100.0) for peak in (94.0, 96.0, 110.0)]
    [False, True, True]
    """
    return _doubt(peak_bytes, usable) > 0


def _doubt(peak_bytes: float, usable: float) -> float:
    if math.isinf(usable) or usable <= 0:
        return 0.0
    return min(max((peak_bytes / usable - (1 - MEMORY_ERROR)) / (2 * MEMORY_ERROR), 0.0), 1.0)
