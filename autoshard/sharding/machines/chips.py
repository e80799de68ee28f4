"""Chips: the figures of one device, with their sources.

    TPU   Peak, memory bandwidth, torus, links and pod size: Google Cloud's page on each TPU version,
          https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x. A pod of v5p has 8960 chips, though
          one job gets at most 6144 of them. A device of tpu7x is one of the two dies of a chip; a device of v4 is a
          whole chip (two cores, "megacore"). Peak at 8 bits: int8 on the pages of v5e, v5p and v6e; that of v4 equals
          its bfloat16 one. The page of tpu7x gives float8 only. JAX's `pallas.tpu` tables agree. The memory is what
          XLA's out-of-memory messages report as available to a program. On-chip memory: the vector memory in JAX's
          `pallas.tpu` tables, summed over the cores of a device; for v4, the common memory that its cores share. Vector
          memory: that of one core, from the same tables. Network: data center network per chip on the page of tpu7x
          (v5p, v6e, tpu7x), per pod on that of v5e; v4 is assumed to have that of v5p. Clock: the one at which the
          matrix units reach the peak (tpu7x: four of 256 x 256 per device).
    GPU   NVIDIA's data sheets: A100 (40 and 80 GB, SXM), H100 SXM, H200 SXM, DGX B200, GB200 NVL72. Peaks are without
          sparsity. Compute capability: developer.nvidia.com/cuda-gpus. 32-bit products run as TF32, XLA's default. At 8
          bits the peak is twice that of 16, for int8 and, except on A100, for float8. Efficiency of H100 and H200 at 16
          bits: the median of seven large products that XLA compiled, on an H200 (`benchmarks/one_gpu.py`, section
          `rates`). Multiprocessors: `core_count` in XLA:GPU's specifications of devices (`audit/gpus.toml`). The
          others: products measured with `mamf-finder.py` over many shapes, the best of them:
          https://github.com/stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS". Products of
          most shapes reach less: for H100 and H200 the page has 0.803.
    CPU   Virtual devices on one host, which share its cores: measured by `autoshard bench --calibrate` for 8 devices on
          2 cores. The memory of the host is that of the devices.

Host bandwidth is one device's share of its host's link, in one direction, as rated. v4 to v6e: part 2 of
jax-ml.github.io/scaling-book, 16 GB/s per chip, 32 GB/s on v6e. tpu7x: no figure is published. Assumed is a PCIe 5.0
x16 link per chip, 64 GB/s, which its two devices share. GPUs: NVIDIA's data sheets, half of the figure for both
directions (A100: PCIe 4.0, 64 GB/s; H100, H200, B200: PCIe 5.0, 128 GB/s; GB200: NVLink-C2C, 900 GB/s for two GPUs).

Host memory is one device's share of the memory of a machine that Google Cloud rents (its pages on TPU versions and on
accelerator-optimized machines), in GB. TPUs, 4 chips: ct4p-hightpu-4t 407, ct5lp-hightpu-4t 192, ct5p-hightpu-4t 448,
ct6e-standard-4t 720, tpu7x-standard-4t 960 (8 devices). GPUs: a2-highgpu-8g 680, a2-ultragpu-8g 1360, a3-highgpu-8g
1872, a3-ultragpu-8g 2952, a4-highgpu-8g 3968, a4x-highgpu-4g 884. Target files set other figures.

The bandwidth of a link is that of one direction. For TPUs it is 0.9 of the rated bandwidth (50 GB/s of v4 and v5e,
100 GB/s of the others), the share that large messages reach: chosen, not measured. A device on a torus has two links in
each dimension; a device on a switch has one, whose figure covers all its lanes. Network bandwidth is one device's share
of what its host sends. Latency is that of one hop on a torus or one crossing of a switch, as a collective sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoshard._shown import shown
from autoshard.sharding.machines import constants
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED as BANDWIDTH_REACHED
from autoshard.sharding.machines.constants import PEAK_REACHED as PEAK_REACHED
from autoshard.sharding.machines.options.asynchronous import (
    GATHER_DIMS,
    SYNCHRONOUS_GATHERS,
    asynchronous_kinds,
    keeps_gathers,
    keeps_reduce_scatters,
)
from autoshard.sharding.machines.options.choice import default_options
from autoshard.sharding.machines.options.option_table import Options as Options

Platform = Literal["tpu", "cuda", "cpu"]

GiB = 2**30
GB = 1e9


@shown
@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        platform: the JAX platform.
        flops: peak FLOP/s at 16 bits.
        flops_f32: peak FLOP/s of 32-bit products at JAX's default precision.
        flops_int8: peak operations per second of int8 products; 0 if they are no faster than those of 16 bits.
        flops_fp8: peak FLOP/s of float8 products; 0 if they are no faster than those of 16 bits.
        memory_bytes: bytes of memory.
        memory_bandwidth: bytes per second between memory and the compute units.
        link_bandwidth: bytes per second that one link (ICI, NVLink) sends in one direction.
        network_bandwidth: bytes per second that one device sends to other hosts (on a TPU, to other slices).
        host_bandwidth: bytes per second between one device and the memory of its host, in one direction; 0 if unknown.
        host_memory_bytes: one device's share of its host's memory; 0 if unknown, which sets no limit.
        link_latency_us: microseconds of one hop.
        network_latency_us: microseconds of one message between hosts or slices.
        torus: number of dimensions of the torus; 0 if devices are joined by a switch.
        wraps_at: a torus dimension whose size is a multiple of this is a ring; others are lines.
        pod: the largest number of chips in one slice (a two-dimensional pod is square); 0 if there are no pods.
        domain: the largest number of devices behind one switch.
        cores: devices per chip; the shape in a target's name counts chips.
        tile: elements along one side of the matrix unit's tiles; 1 if tiling does not matter.
        hides: kinds of collectives that the compiler makes asynchronous under `options`, so that compute hides them.
        synchronous_gathers: gathers over groups of up to this many devices are synchronous in spite of `hides`.
        gather_dims: so are gathers over groups that are not a box of neighbours in so many dimensions of the torus.
        keeps_gathers: the compiler keeps gathers over several torus dimensions. None is then synchronous by its group.
        keeps_reduce_scatters: the compiler emits reduce-scatters. Otherwise it emits all-reduces instead.
        options: compiler options (`options.default_options`). They are part of every plan for this chip.
        clock_hz: cycles per second of the compiler's cycle estimates; 0 if the compiler gives none.
        on_chip_bytes: bytes of on-chip memory in which the compiler keeps whole arrays; 0 if it keeps none there.
        vector_memory_bytes: bytes of vector memory of one core of a TPU, which kernels may use.
        efficiency: fraction of the peak FLOP/s that large products reach.
        efficiency_fp8: the same for float8 products; 0 if it is `efficiency`.
        vector_ops: 32-bit operations per second of the vector units; 0 if kernels are not priced by them (GPUs).
        multiprocessors: streaming multiprocessors, which compute and collectives share; 0 if collectives take none.
        compute_capability: NVIDIA's version of the architecture, such as 9.0; 0 if unknown.
        hides_fetches: whether compute hides fetches from host memory.
        kinds: substrings of JAX's `device_kind` that identify this chip.
    """

    platform: Platform
    flops: float
    flops_f32: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    link_latency_us: float = constants.TORUS_LATENCY_US
    network_latency_us: float = constants.SLICE_LATENCY_US
    host_bandwidth: float = 0.0
    host_memory_bytes: float = 0.0
    torus: int = 0
    wraps_at: int = 0
    pod: int = 0
    domain: int = 0
    cores: int = 1
    tile: int = 1
    flops_int8: float = 0.0
    flops_fp8: float = 0.0
    hides: tuple[str, ...] = ()
    synchronous_gathers: int = 0
    gather_dims: int = 0
    keeps_gathers: bool = False
    keeps_reduce_scatters: bool = True
    options: Options = field(default_factory=dict, hash=False)
    clock_hz: float = 0.0
    on_chip_bytes: float = 0.0
    vector_memory_bytes: int = 0
    vector_ops: float = 0.0
    multiprocessors: int = 0
    compute_capability: float = 0.0
    hides_fetches: bool = True
    efficiency: float = PEAK_REACHED
    efficiency_fp8: float = 0.0
    kinds: tuple[str, ...] = field(default=(), repr=False)

    def peak(self, itemsize: int, *, integer: bool = False) -> float:
        """Peak FLOP/s on elements of `itemsize` bytes, integers or floating-point numbers.

        Where 8-bit products are no faster, this is the peak at 16 bits.
        """
        if itemsize == 1:
            return (self.flops_int8 if integer else self.flops_fp8) or self.flops
        return self.flops if itemsize <= 2 else self.flops_f32

    def reached(self, itemsize: int, *, integer: bool = False) -> float:
        """FLOP/s that large products reach, for elements as in `peak`."""
        is_fp8 = itemsize == 1 and not integer and self.flops_fp8 > 0
        return self.peak(itemsize, integer=integer) * (is_fp8 and self.efficiency_fp8 or self.efficiency)

    @property
    def host_limit_bytes(self) -> float:
        """The bytes of host memory that the values of one device may take; infinite if no limit is known."""
        share = constants.HOST_MEMORY_SHARE * self.host_memory_bytes or math.inf
        return min(share, constants.COMPILERS_HOST_BYTES.get(self.platform, math.inf))


_ASYNCHRONOUS = ("all-gather", "reduce-scatter", "all-reduce")


def _tpu(
    name: str,
    *,
    tflops: float,
    gib: float,
    hbm_gb: float,
    link_gb: float,
    net_gb: float,
    host_gb: float,
    ram_gb: float,
    torus: int,
    kinds: str,
    tile: int = 128,
    on_chip_mib: int = 128,
    vector_mib: int = 128,
    vector_units: int = 1,
    **more: Any,
) -> Chip:
    wraps_at, options = 16 if torus == 2 else 4, default_options(name)  # chips of a ring: jax-ml.github.io/scaling-book
    return Chip(
        "tpu", tflops * 1e12, tflops * 1e12, gib * GiB, hbm_gb * GB, link_gb * GB, net_gb * GB,
        host_bandwidth=host_gb * GB, host_memory_bytes=ram_gb * GB, torus=torus, wraps_at=wraps_at,
        tile=tile, kinds=tuple(kinds.split("|")), on_chip_bytes=on_chip_mib * 2**20,
        vector_memory_bytes=vector_mib * 2**20, vector_ops=vector_units * constants.VECTOR_LANES * more["clock_hz"],
        hides=asynchronous_kinds(name, options), synchronous_gathers=SYNCHRONOUS_GATHERS.get(name, 0),
        gather_dims=GATHER_DIMS.get(name, 0), keeps_gathers=keeps_gathers(name, options),
        hides_fetches=name not in constants.EXPOSED_FETCHES,
        keeps_reduce_scatters=keeps_reduce_scatters(name, options), options=options, **more,
    )  # fmt: skip


def _gpu(
    *,
    tflops: float,
    gb: float,
    hbm_gb: float,
    nvlink_gb: float,
    net_gb: float,
    host_gb: float,
    ram_gb: float,
    kinds: str,
    efficiency_fp8: float = 0.0,
    **more: Any,
) -> Chip:
    return Chip(
        "cuda", tflops * 1e12, tflops / 2 * 1e12, gb * GB, hbm_gb * GB, nvlink_gb * GB, net_gb * GB,
        constants.NVLINK_LATENCY_US, constants.GPU_HOST_LATENCY_US, host_gb * GB, ram_gb * GB,
        tile=constants.GPU_TILE, hides=_ASYNCHRONOUS, flops_int8=2e12 * tflops,
        flops_fp8=2e12 * tflops * (efficiency_fp8 > 0), efficiency_fp8=efficiency_fp8,
        kinds=tuple(kinds.split("|")), options=default_options("h100"), **more,  # all GPUs have the same
    )  # fmt: skip


_A100 = _gpu(
    tflops=312,
    gb=80,
    hbm_gb=2039,
    nvlink_gb=300,
    net_gb=25,
    host_gb=32,
    ram_gb=1360 / 8,
    domain=8,
    multiprocessors=108,
    compute_capability=8.0,
    kinds="a100",
    efficiency=0.869,
)
_H100 = _gpu(
    tflops=989,
    gb=80,
    hbm_gb=3350,
    nvlink_gb=450,
    net_gb=50,
    host_gb=64,
    ram_gb=1872 / 8,
    domain=8,
    multiprocessors=132,
    compute_capability=9.0,
    kinds="h100",
    efficiency=0.719,
    efficiency_fp8=0.709,
)
# TPUs: `benchmarks/recipe_calibration.py` calibrates `efficiency`; for v5e, `benchmarks/product_efficiency.py` does.
CHIPS: Mapping[str, Chip] = {
    "v4": _tpu(
        "v4",
        tflops=275,
        gib=30.75,
        hbm_gb=1228,
        link_gb=45,
        net_gb=6.25,
        host_gb=16,
        ram_gb=407 / 4,
        torus=3,
        pod=4096,
        kinds="v4",
        vector_mib=16,
        vector_units=2,
        clock_hz=1.05e9,
    ),
    "v5e": _tpu(
        "v5e",
        tflops=197,
        gib=15.75,
        hbm_gb=819,
        link_gb=45,
        net_gb=3.125,
        host_gb=16,
        ram_gb=192 / 4,
        torus=2,
        pod=256,
        kinds="v5 lite|v5e|v5litepod",
        clock_hz=1.5e9,
        flops_int8=394e12,
        efficiency=0.844,
    ),
    "v5p": _tpu(
        "v5p",
        tflops=459,
        gib=95.74,
        hbm_gb=2765,
        link_gb=90,
        net_gb=6.25,
        host_gb=16,
        ram_gb=448 / 4,
        torus=3,
        pod=8960,
        kinds="v5p|v5",
        vector_mib=64,
        vector_units=2,
        clock_hz=1.75e9,
        flops_int8=918e12,
        efficiency=0.911,
    ),
    "v6e": _tpu(
        "v6e",
        tflops=918,
        gib=31.25,
        hbm_gb=1640,
        link_gb=90,
        net_gb=12.5,
        host_gb=32,
        ram_gb=720 / 4,
        torus=2,
        pod=256,
        kinds="v6 lite|v6e",
        tile=256,
        clock_hz=1.75e9,
        flops_int8=1836e12,
        efficiency=0.636,
    ),
    "tpu7x": _tpu(
        "tpu7x",
        tflops=1154,
        gib=94.75,
        hbm_gb=3690,
        link_gb=90,
        net_gb=6.25,
        host_gb=32,
        ram_gb=960 / 8,
        torus=3,
        pod=9216,
        kinds="tpu7x|v7x",
        tile=256,
        cores=2,
        on_chip_mib=64,
        vector_mib=64,
        clock_hz=2.2e9,
        flops_fp8=2307e12,
        efficiency=0.734,
        efficiency_fp8=0.682,
    ),
    "a100-40": replace(
        _A100,
        memory_bytes=40 * GB,
        memory_bandwidth=1555 * GB,
        host_memory_bytes=680 / 8 * GB,
        kinds=("a100-sxm4-40gb", "a100 40gb"),
    ),
    "a100-80": _A100,
    "h100": _H100,
    "h200": replace(
        _H100,
        memory_bytes=141 * GB,
        memory_bandwidth=4800 * GB,
        host_memory_bytes=2952 / 8 * GB,
        efficiency_fp8=0.734,
        kinds=("h200",),
    ),
    "b200": _gpu(
        tflops=2250,
        gb=180,
        hbm_gb=8000,
        nvlink_gb=900,
        net_gb=50,
        host_gb=64,
        ram_gb=3968 / 8,
        domain=8,
        multiprocessors=148,
        compute_capability=10.0,
        kinds="b200",
        efficiency=0.776,
        efficiency_fp8=0.763,
    ),
    "gb200": _gpu(
        tflops=2500,
        gb=186,
        hbm_gb=8000,
        nvlink_gb=900,
        net_gb=50,
        host_gb=225,
        ram_gb=884 / 4,
        domain=72,
        multiprocessors=148,
        compute_capability=10.0,
        kinds="gb200",
        efficiency=0.729,
        efficiency_fp8=0.723,
    ),
    "cpu": Chip("cpu", 3e10, 3e10, 4 * GiB, 2e9, 1.5e9, 1e9, 30.0, 100.0, 2e9, domain=1 << 20),
}
ALIASES: Mapping[str, str] = {"a100": "a100-80", "v5litepod": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x"}
# The chip that an unknown kind of device is planned as: platform -> chip.
STAND_INS: Mapping[str, str] = {"tpu": "v5e", "gpu": "a100-80", "cuda": "a100-80", "rocm": "a100-80"}


def chip_name(kind: str) -> str | None:
    """The chip with this `device_kind` of JAX; None if it is unknown, as for CPUs."""
    found = [(len(part), name) for name, chip in CHIPS.items() for part in chip.kinds if part in kind.lower()]
    return max(found)[1] if found else None
