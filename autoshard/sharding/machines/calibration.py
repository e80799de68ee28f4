"""Measures the attached devices and describes them as a target.

    flops             2 n^3 / seconds of a product of n x n matrices, at 16 and at 32 bits
    memory bandwidth  3 b / seconds of adding two arrays of b bytes: two are read, one is written
    links             two all-gathers of b and B bytes a device take latency + (n - 1) b / bandwidth each

All devices compute at the same time, as in a step: virtual ones share a processor. Each figure is the best of several
runs: what else the machine does only ever makes it slower. Peaks are what was reached, so a plan's times on the target
are those of this machine; the cost model's own allowance for what is not reached (`cost.PEAK_REACHED`,
`cost.BANDWIDTH_REACHED`) is taken out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.sharding.machines.chips import BANDWIDTH_REACHED, PEAK_REACHED
from autoshard.sharding.machines.device_mesh import device_mesh, topology_order
from autoshard.sharding.machines.targets import Target, target_for
from autoshard.sharding.machines.topology import Dim, Topology


@dataclass(frozen=True)
class Effort:
    """How much is computed and moved.

    Attributes:
        matrix: rows and columns of the matrices that are multiplied.
        array_bytes: of the arrays that are added.
        shard_bytes: of a device's part in the larger gather.
        runs: of which the best counts.
    """

    matrix: int = 4096
    array_bytes: int = 1 << 28
    shard_bytes: int = 1 << 24
    runs: int = 7


EFFORT = {"cpu": Effort(matrix=1024, array_bytes=1 << 25, shard_bytes=1 << 20), "tpu": Effort(), "gpu": Effort()}


def calibrate(devices: Sequence[Any] | None = None, effort: Effort | None = None) -> Target:
    """The machine that the attached devices make up, with figures that were measured on them.

    Args:
        devices: of one kind; default: all attached ones.
        effort: how much is computed and moved; default: as much as suits the platform.
    """
    devices = topology_order(jax.devices() if devices is None else devices)
    effort = effort or EFFORT[devices[0].platform]
    known = target_for(devices, len(devices))
    half, single = (_flops(devices, effort, dtype) / PEAK_REACHED for dtype in (jnp.bfloat16, jnp.float32))
    chip = replace(
        known.chip,
        flops=max(half, single) if known.platform == "cpu" else half,
        flops_f32=single,
        flops_8bit=0.0,
        memory_bytes=float(_memory_bytes(devices[0]) or known.chip.memory_bytes),
        memory_bandwidth=_memory_bandwidth(devices, effort) / BANDWIDTH_REACHED,
    )
    if len(devices) == 1:
        return replace(known, chip=chip)
    bandwidth, latency_us = _links(devices, effort)
    pieces = known.assign({"all": len(devices)}).pieces["all"]
    expected = (len(devices) - 1) / known.topology.time_us("all-gather", pieces, 1e9) * 1e15
    slower = bandwidth / expected
    dims = tuple(_measured(d, d.bandwidth * slower, latency_us) for d in known.topology.dims)
    near = dims[-1]
    chip = replace(chip, link_bandwidth=near.bandwidth, link_latency_us=near.latency_us,
                   network_bandwidth=chip.network_bandwidth * slower)  # fmt: skip
    return Target(known.name, chip, Topology(dims))


def _measured(dim: Dim, bandwidth: float, latency_us: float) -> Dim:
    """A dimension with the latency of a collective over all of it, of which as large a part is each device's."""
    each = dim.each_us / (dim.latency_us + dim.each_us * (dim.size - 1))
    rest = latency_us * (1 - each * (dim.size - 1))
    return replace(dim, bandwidth=bandwidth, latency_us=rest, each_us=latency_us * each)


def _best(run: Callable[[], Any], runs: int) -> float:
    """Seconds of the fastest of several runs, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def _cut(devices: Sequence[Any]) -> NamedSharding:
    """An array's first dimension over all devices."""
    return NamedSharding(device_mesh({"all": len(devices)}, list(devices)), PartitionSpec("all"))


def _flops(devices: Sequence[Any], effort: Effort, dtype: Any) -> float:
    n = effort.matrix
    x = jax.device_put(jnp.ones((len(devices), n, n), dtype), _cut(devices))
    product = jax.jit(lambda a, b: a @ b)
    return 2.0 * n**3 / _best(lambda: product(x, x), effort.runs)


def _memory_bandwidth(devices: Sequence[Any], effort: Effort) -> float:
    x = jax.device_put(jnp.ones((len(devices), effort.array_bytes // 4), jnp.float32), _cut(devices))
    add = jax.jit(lambda a, b: a + b)
    return 3.0 * effort.array_bytes / _best(lambda: add(x, x), effort.runs)


def _memory_bytes(device: Any) -> int | None:
    """What the device says it has; None where it does not say."""
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    return (stats or {}).get("bytes_limit")


def _links(devices: Sequence[Any], effort: Effort) -> tuple[float, float]:
    """Bytes per second of a gather over all devices, and its latency in microseconds."""
    n = len(devices)
    cut = _cut(devices)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(cut.mesh, PartitionSpec()))

    def seconds(shard_bytes: int) -> float:
        x = jax.device_put(jnp.ones(n * shard_bytes // 4, jnp.float32), cut)
        return _best(lambda: gather(x), effort.runs)

    small, large = 1 << 10, effort.shard_bytes
    fast, slow = seconds(small), seconds(large)
    bandwidth = (n - 1) * (large - small) / max(slow - fast, 1e-9)
    return bandwidth, max(fast * 1e6 - (n - 1) * small / bandwidth * 1e6, 0.1)
