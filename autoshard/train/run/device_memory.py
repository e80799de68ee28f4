"""The memory of the fullest device of a run: measured where the platform reports it, else as the plan predicts it."""

from __future__ import annotations

from typing import Any

import jax

from autoshard.train.run import distributed

MEASURED, PREDICTED = "memory_bytes", "predicted_memory_bytes"


def fullest_device(plan: Any, step: int) -> dict[str, float]:
    """Return the peak memory of the fullest device so far, in bytes; every process must call this at the same step.

    Args:
        plan: The plan of the train step.
        step: Steps done.

    Returns:
        `memory_bytes`, the maximum over the devices of all processes. `predicted_memory_bytes`, the peak that the plan
        predicts, if the devices report no memory, as CPUs do.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [float(each.get("peak_bytes_in_use", each.get("bytes_in_use", -1))) for each in stats]
    if min(peaks) < 0:  # a property of the platform, so alike in all processes
        return {PREDICTED: float(plan.estimate.peak_memory_bytes)}
    highest = max(peaks)
    if jax.process_count() > 1:
        (highest,) = distributed.maximum_over_processes(f"step {step}: peak memory", [highest])
    return {MEASURED: highest}
