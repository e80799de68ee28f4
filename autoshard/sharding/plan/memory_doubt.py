"""Ranks plans by their time, with a penalty if their memory is close to the limit.

The estimate of the peak memory has an error. If the estimate is close to the limit, the compiled program may exceed it.
XLA then rematerializes values and hides fewer gathers, or it fails. So plans are ranked by

    ranked time = estimated time * (1 + SLOWDOWN_WITHOUT_MEMORY * doubt)

where `doubt` is the probability that the compiled program exceeds the limit, if all errors up to `MEMORY_ERROR` are
equally likely. It is 0 if the estimate is at most (1 - MEMORY_ERROR) times the limit, and 0.5 if it equals the limit.

Compiled for tpu7x:4x4x4 (libtpu 0.0.42.1), Llama-3 70B under `fsdp:128`: two microbatches that keep more values are
1.1 % faster by the estimate, at 98.9 % of the memory. But XLA computes the gradient of a weight twice, and no compute
hides the gathers of the forward pass. The step takes 7 % longer than one microbatch at 87 % of the memory.
"""

from __future__ import annotations

import math

from autoshard.sharding.plan.sharding_plan import ShardingPlan

# Relative error of the estimated peak memory. Source: chosen. It is the bar that `benchmarks/peak_memory.py` holds the
# estimate to, not the measured tail of the errors, which is longer (`MOST_MEMORY_ERROR`).
MEMORY_ERROR = 0.05

# Relative time that a step loses if its program needs more memory than there is. Source:
# `benchmarks/memory_pressure.py`, a step on v5e whose plan needs 2 % more than the memory.
SLOWDOWN_WITHOUT_MEMORY = 0.16


def ranked_us(time_us: float, peak_bytes: float, limit: float) -> float:
    """Return the time by which a plan is ranked, in the unit of `time_us`.

    Args:
        time_us: its estimated step time.
        peak_bytes: its estimated peak memory.
        limit: memory of one device, in bytes; infinite if there is no limit.

    >>> [round(ranked_us(100.0, peak, 100.0), 1) for peak in (80.0, 95.0, 97.5, 100.0)]
    [100.0, 100.0, 104.0, 108.0]
    """
    return time_us * (1 + SLOWDOWN_WITHOUT_MEMORY * _doubt(peak_bytes, limit))


def plan_ranked_us(plan: ShardingPlan) -> float:
    """Return the time in microseconds by which a plan is ranked, see `ranked_us`."""
    return ranked_us(plan.estimate.step_time_us, plan.estimate.peak_memory_bytes, plan.limit_bytes or math.inf)


def almost_fills(peak_bytes: float, limit: float) -> bool:
    """Whether a plan may exceed the limit when it is compiled.

    >>> [almost_fills(peak, 100.0) for peak in (94.0, 96.0, 110.0)]
    [False, True, True]
    """
    return _doubt(peak_bytes, limit) > 0


def _doubt(peak_bytes: float, limit: float) -> float:
    if math.isinf(limit) or limit <= 0:
        return 0.0
    return min(max((peak_bytes / limit - (1 - MEMORY_ERROR)) / (2 * MEMORY_ERROR), 0.0), 1.0)
