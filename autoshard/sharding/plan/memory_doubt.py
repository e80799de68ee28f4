"""Ranks plans by their time, with a penalty if their memory is close to what a program may use.

A program that needs more memory than that is slow, if it compiles: XLA rematerializes values, and hides fewer gathers.
XLA:TPU does so from `FULL_SHARE` of the device's memory on. And the estimate of the peak memory has an error. So plans
are ranked by

    ranked time = estimated time * (1 + SLOWDOWN_WITHOUT_MEMORY * doubt)

where `doubt` is the probability that the compiled program exceeds `full_bytes`, if all errors up to `MEMORY_ERROR` are
equally likely. It is 0.5 if the estimate equals `full_bytes`, and 0 if the estimate is less by `MEMORY_ERROR` of that.

Compiled for v6e:2x4 (libtpu 0.0.42.1), Mistral 7B under `fsdp:8`: a plan at 95.4 % of the memory takes 5.4 s, because
XLA computes products again and brings values from the host late. A plan that is slower by 0.04 % by the estimate, at
73 %, takes 4.9 s. For v5e:4x4, GPT 2.6B under `dp:2 fsdp:8`: a plan at 95 % takes 5.9 s, and one that is slower by
1.6 % by the estimate, at 87 %, 4.6 s. For tpu7x:4x4x4, Llama-3 70B under `fsdp:128`: two microbatches at 98.9 % of the
memory are faster by 1.1 % by the estimate, and take 7 % longer than one at 87 %.
"""

from __future__ import annotations

import math

from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.plan.sharding_plan import ShardingPlan

# Relative error of the estimated peak memory. Source: chosen. It is the bar that `benchmarks/peak_memory.py` holds the
# estimate to, not the measured tail of the errors, which is longer (`MOST_MEMORY_ERROR`).
MEMORY_ERROR = 0.05

# The share of a TPU's memory from which on XLA rematerializes. Source: `benchmarks/memory_pressure.py`, on v5e, joined
# measure. The step that offloads takes equal times while its plan takes up to 95 % of the memory (94.9 % by the
# compiler's peak), and 33 % longer at 96 %. The step that keeps values, with the option set `full-memory`, takes 14 %
# longer at 95 % (96.1 % by the compiler's peak).
FULL_SHARE = 0.95

# Relative time that a step loses if its program needs more than that. Source: chosen, between what the variants of
# `benchmarks/memory_pressure.py` lose at their two largest shares: 0.05 to 0.28 by the roofline (mean 0.14), -0.04 to
# 0.33 by the joined measure (mean 0.11).
SLOWDOWN_WITHOUT_MEMORY = 0.16


def full_bytes(limit: float, chip: Chip) -> float:
    """Return the peak memory in bytes from which on a program is slow.

    It is the limit, and on a TPU at most `FULL_SHARE` of the memory. XLA does not know a limit that the user gives.

    Args:
        limit: the bytes that a plan may take on one device; infinite if there is no limit.
        chip: the chip.

    >>> from autoshard.sharding.machines.chips import CHIPS
    >>> cases = (15.75, "v5e"), (1.0, "v5e"), (70.0, "h100")
    >>> [round(full_bytes(gib * 2**30, CHIPS[name]) / 2**30, 2) for gib, name in cases]
    [14.96, 1.0, 70.0]
    """
    if chip.platform != "tpu" or math.isinf(limit) or not chip.memory_bytes:
        return limit
    return min(limit, FULL_SHARE * chip.memory_bytes)


def ranked_us(time_us: float, peak_bytes: float, full: float) -> float:
    """Return the time by which a plan is ranked, in the unit of `time_us`.

    Args:
        time_us: its estimated step time.
        peak_bytes: its estimated peak memory.
        full: the peak from which on its program is slow (`full_bytes`); infinite if there is none.

    >>> [round(ranked_us(100.0, peak, 100.0), 1) for peak in (80.0, 95.0, 97.5, 100.0, 105.0)]
    [100.0, 100.0, 104.0, 108.0, 116.0]
    """
    return time_us * (1 + SLOWDOWN_WITHOUT_MEMORY * _doubt(peak_bytes, full))


def full_bytes_of(plan: ShardingPlan) -> float:
    """Return the peak memory in bytes from which on a plan's program is slow. Plans of older versions do not say it."""
    return plan.full_bytes or plan.limit_bytes or math.inf


def plan_ranked_us(plan: ShardingPlan) -> float:
    """Return the time in microseconds by which a plan is ranked, see `ranked_us`."""
    return ranked_us(plan.estimate.step_time_us, plan.estimate.peak_memory_bytes, full_bytes_of(plan))


def almost_fills(peak_bytes: float, full: float) -> bool:
    """Whether a plan's program may be slow, because it takes almost all of the memory that it may use, or more.

    >>> [almost_fills(peak, 100.0) for peak in (94.0, 96.0, 110.0)]
    [False, True, True]
    """
    return _doubt(peak_bytes, full) > 0


def _doubt(peak_bytes: float, full: float) -> float:
    if math.isinf(full) or full <= 0:
        return 0.0
    return min(max((peak_bytes / full - (1 - MEMORY_ERROR)) / (2 * MEMORY_ERROR), 0.0), 1.0)
