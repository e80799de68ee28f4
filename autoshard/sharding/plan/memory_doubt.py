"""Ranks plans by their time, with a penalty if their memory is close to the limit.

XLA:TPU begins to compute values again before a program fills the memory, at `FULL_SHARE` of it. And the estimate of the
peak memory has an error. So plans are ranked by

    ranked time = estimated time * (1 + SLOWDOWN_WITHOUT_MEMORY * doubt)

where `doubt` is the probability that the compiled program exceeds `FULL_SHARE` of the limit, if all errors up to
`MEMORY_ERROR` are equally likely. It is 0.5 if the estimate is `FULL_SHARE` of the limit, and 0 if it is less by
`MEMORY_ERROR` of that.

Compiled for v6e:2x4 (libtpu 0.0.42.1), Mistral 7B under `fsdp:8`: a plan at 95.4 % of the memory takes 5.4 s, because
XLA computes products again and brings values from the host late. A plan that is slower by 0.04 % by the estimate, at
73 %, takes 4.9 s. For tpu7x:4x4x4, Llama-3 70B under `fsdp:128`: two microbatches at 98.9 % of the memory are faster by
1.1 % by the estimate, and take 7 % longer than one at 87 %: XLA computes the gradient of a weight twice, and no compute
hides the gathers of the forward pass.
"""

from __future__ import annotations

import math

from autoshard.sharding.plan.sharding_plan import ShardingPlan

# Relative error of the estimated peak memory. Source: chosen. It is the bar that `benchmarks/peak_memory.py` holds the
# estimate to, not the measured tail of the errors, which is longer (`MOST_MEMORY_ERROR`).
MEMORY_ERROR = 0.05

# The share of the memory at which XLA:TPU begins to compute values again. Source: `benchmarks/memory_pressure.py`. On
# v5e, the step that offloads takes equal times up to 95 % of the memory, by the plan and as compiled, and 33 % longer
# at 96 %. The step that keeps values, with the scheduler allowed all of the memory, takes 14 % longer at 95 %.
FULL_SHARE = 0.95

# Relative time that a step then loses. Source: `benchmarks/memory_pressure.py`, by the roofline: the mean of the
# variants at their two largest shares is 0.14 (0.05 to 0.28), rounded up.
SLOWDOWN_WITHOUT_MEMORY = 0.16


def ranked_us(time_us: float, peak_bytes: float, limit: float) -> float:
    """Return the time by which a plan is ranked, in the unit of `time_us`.

    Args:
        time_us: its estimated step time.
        peak_bytes: its estimated peak memory.
        limit: memory of one device, in bytes; infinite if there is no limit.

    >>> [round(ranked_us(100.0, peak, 100.0), 1) for peak in (80.0, 90.0, 92.5, 95.0, 100.0)]
    [100.0, 100.0, 103.8, 108.0, 116.0]
    """
    return time_us * (1 + SLOWDOWN_WITHOUT_MEMORY * _doubt(peak_bytes, limit))


def plan_ranked_us(plan: ShardingPlan) -> float:
    """Return the time in microseconds by which a plan is ranked, see `ranked_us`."""
    return ranked_us(plan.estimate.step_time_us, plan.estimate.peak_memory_bytes, plan.limit_bytes or math.inf)


def almost_fills(peak_bytes: float, limit: float) -> bool:
    """Whether a plan may be slow when it is compiled, because its program almost fills the memory or exceeds it.

    >>> [almost_fills(peak, 100.0) for peak in (90.0, 92.0, 110.0)]
    [False, True, True]
    """
    return _doubt(peak_bytes, limit) > 0


def _doubt(peak_bytes: float, limit: float) -> float:
    if math.isinf(limit) or limit <= 0:
        return 0.0
    share = peak_bytes / (FULL_SHARE * limit)
    return min(max((share - (1 - MEMORY_ERROR)) / (2 * MEMORY_ERROR), 0.0), 1.0)
