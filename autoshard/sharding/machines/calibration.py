"""Measures the attached devices and describes them as a target.

    flops             2 n^3 / seconds of a product of n x n matrices, at 16 and at 32 bits
    memory bandwidth  3 b / seconds of adding two arrays of b bytes: two are read, one is written
    links             an all-gather of n shards of b bytes takes latency + (n - 1) b / bandwidth; measured for two
                      values of b

All devices compute at the same time, as in a step, because virtual devices share a processor. Each figure comes from
the fastest of several runs, because other work on the machine can only slow a run down. The cost model multiplies peaks
by `PEAK_REACHED` and `BANDWIDTH_REACHED`; calibration divides by them, so that predicted times match measured ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.sharding.machines import constants
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED, PEAK_REACHED
from autoshard.sharding.machines.device_mesh import device_mesh, topology_order
from autoshard.sharding.machines.targets import Target, target_for
from autoshard.sharding.machines.topology import Dim


@dataclass(frozen=True)
class MeasurementSizes:
    """The sizes of the measurements.

    Attributes:
        matrix: rows and columns of the matrices that are multiplied.
        array_bytes: bytes of each array that is added.
        shard_bytes: bytes of a device's shard in the larger all-gather.
        runs: number of runs, the fastest of which counts.
    """

    matrix: int = constants.MATRIX
    array_bytes: int = constants.ARRAY_BYTES
    shard_bytes: int = constants.SHARD_BYTES
    runs: int = constants.RUNS


EFFORT = {
    "cpu": MeasurementSizes(constants.CPU_MATRIX, constants.CPU_ARRAY_BYTES, constants.CPU_SHARD_BYTES),
    "tpu": MeasurementSizes(),
    "gpu": MeasurementSizes(),
}


def calibrate(devices: Sequence[Any] | None = None, effort: MeasurementSizes | None = None) -> Target:
    """Measures the attached devices and returns the target that they form.

    Args:
        devices: devices of one kind. Default: all attached devices.
        effort: sizes of the measurements. Default: those of the platform in `EFFORT`.
    """
    devices = topology_order(jax.devices() if devices is None else devices)
    effort = effort or EFFORT[devices[0].platform]
    rated = target_for(devices, len(devices))
    flops_16bit, flops_32bit = (_flops(devices, effort, dtype) / PEAK_REACHED for dtype in (jnp.bfloat16, jnp.float32))
    chip = replace(
        rated.chip,
        flops=max(flops_16bit, flops_32bit) if rated.platform == "cpu" else flops_16bit,
        flops_f32=flops_32bit,
        flops_int8=0.0,
        flops_fp8=0.0,
        memory_bytes=float(_memory_bytes(devices[0]) or rated.chip.memory_bytes),
        memory_bandwidth=_memory_bandwidth(devices, effort) / BANDWIDTH_REACHED,
    )
    if len(devices) == 1:
        return replace(rated, chip=chip)
    bandwidth, latency_us = _links(devices, effort)
    pieces = rated.assign({"all": len(devices)}).pieces["all"]
    # Bytes per second that the rated links predict for an all-gather of shards of 1e9 bytes.
    predicted = (len(devices) - 1) / rated.topology.time_us("all-gather", pieces, 1e9) * 1e15
    ratio = bandwidth / predicted
    dims = tuple(_with_measured_link(d, d.bandwidth * ratio, latency_us) for d in rated.topology.dims)
    near = dims[-1]
    chip = replace(chip, link_bandwidth=near.bandwidth, link_latency_us=near.latency_us,
                   network_bandwidth=chip.network_bandwidth * ratio)  # fmt: skip
    return Target(rated.name, chip, replace(rated.topology, dims=dims))


def _with_measured_link(dim: Dim, bandwidth: float, latency_us: float) -> Dim:
    """`dim` with this bandwidth, and latencies scaled so that a collective over all of it has `latency_us`."""
    each_share = dim.each_us / (dim.latency_us + dim.each_us * (dim.size - 1))
    first_us = latency_us * (1 - each_share * (dim.size - 1))
    return replace(dim, bandwidth=bandwidth, latency_us=first_us, each_us=latency_us * each_share)


def _fastest_s(run: Callable[[], Any], runs: int) -> float:
    """Seconds of the fastest of several runs. A first run, which compiles, does not count."""
    jax.block_until_ready(run())
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def _sharded(devices: Sequence[Any]) -> NamedSharding:
    """Shards the leading dimension over all devices."""
    return NamedSharding(device_mesh({"all": len(devices)}, list(devices)), PartitionSpec("all"))


def _flops(devices: Sequence[Any], effort: MeasurementSizes, dtype: Any) -> float:
    n = effort.matrix
    x = jax.device_put(jnp.ones((len(devices), n, n), dtype), _sharded(devices))
    product = jax.jit(lambda a, b: a @ b)
    return 2.0 * n**3 / _fastest_s(lambda: product(x, x), effort.runs)


def _memory_bandwidth(devices: Sequence[Any], effort: MeasurementSizes) -> float:
    x = jax.device_put(jnp.ones((len(devices), effort.array_bytes // 4), jnp.float32), _sharded(devices))
    add = jax.jit(lambda a, b: a + b)
    return 3.0 * effort.array_bytes / _fastest_s(lambda: add(x, x), effort.runs)


def _memory_bytes(device: Any) -> int | None:
    """The memory limit that the device reports; None if it reports none."""
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    return (stats or {}).get("bytes_limit")


def _links(devices: Sequence[Any], effort: MeasurementSizes) -> tuple[float, float]:
    """Bytes per second and latency in microseconds of an all-gather over all devices."""
    n = len(devices)
    sharded = _sharded(devices)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(sharded.mesh, PartitionSpec()))

    def seconds(shard_bytes: int) -> float:
        x = jax.device_put(jnp.ones(n * shard_bytes // 4, jnp.float32), sharded)
        return _fastest_s(lambda: gather(x), effort.runs)

    small, large = constants.SMALL_SHARD_BYTES, effort.shard_bytes
    small_s, large_s = seconds(small), seconds(large)
    bandwidth = (n - 1) * (large - small) / max(large_s - small_s, constants.LEAST_DIFFERENCE_S)
    return bandwidth, max(small_s * 1e6 - (n - 1) * small / bandwidth * 1e6, constants.LEAST_LATENCY_US)
