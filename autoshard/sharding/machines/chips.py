"""Chips: what one device computes, holds and sends, with the sources of the figures.

    TPU   Google Cloud's pages on each TPU version (peak, memory, memory bandwidth, torus, interconnect). A device of
          tpu7x is one of a chip's two dies; one of v4 is a whole chip (two cores, "megacore"). The memory of
          v4 to v6e is what XLA lets a program have of it, by its own messages. Chips of a pod: the same pages,
          https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x ("TPU Pod size"; on v5p jobs are
          scheduled on 6144 of them at most).
    GPU   NVIDIA's data sheets: A100 (40 and 80 GB, SXM), H100 SXM, H200 SXM, DGX B200, GB200 NVL72. Peaks are dense.
          32-bit products run as TF32, which is what XLA does by default.
    CPU   stands for virtual devices on one host, which share its cores: measured by `calibrate` for 8 on 2 cores.

Link bandwidth is one way, of one link: a device of a torus has two in each dimension, a device of a switch one bundle.
On-chip memory is the vector memory of all cores of a device (common memory on v4), by JAX's `pallas.tpu` tables.
The network's is a device's share of what its host sends to others. Latencies are those of one hop of a ring or one
crossing of a switch, as seen by a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard._shown import shown

Platform = Literal["tpu", "cuda", "cpu"]
Options = Mapping[str, str | bool | int | float]  # of XLA, by name

GiB = 2**30
GB = 1e9


@shown
@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        platform: the JAX platform.
        flops: peak operations per second at 16 bits.
        flops_f32: the same of products of 32-bit numbers at JAX's default precision.
        flops_8bit: the same at 8 bits (float8; int8 where there is no float8).
        memory_bytes: memory of a device, in bytes.
        memory_bandwidth: bytes per second between it and the compute units.
        link_bandwidth: bytes per second that one link sends, one way.
        network_bandwidth: bytes per second that a device sends to other hosts' (other slices' of a TPU).
        link_latency_us: time for one hop, in microseconds.
        network_latency_us: the same between hosts or slices.
        torus: dimensions of its torus; 0 where devices hang on a switch.
        wraps_at: a torus dimension is a ring where its size is a multiple of this, a line elsewhere.
        pod: the most chips of one slice, whose torus is square where it has two dimensions; 0 if it has none.
        domain: the most devices behind one switch.
        cores: devices of a chip that a topology's shape counts once.
        tile: elements along a side of the matrix unit's tiles; 1 if it does not matter.
        hides: the collectives that its compiler starts early and waits for late, with the options of `options`.
        options: what its compiler is told; a plan brings them along.
        clock_hz: cycles per second by which the compiler's own estimates are to be read; 0 if it gives none.
        on_chip_bytes: memory on the chip in which its compiler keeps whole arrays; 0 if it keeps none there.
    """

    platform: Platform
    flops: float
    flops_f32: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    link_latency_us: float = 1.0
    network_latency_us: float = 20.0
    torus: int = 0
    wraps_at: int = 0
    pod: int = 0
    domain: int = 0
    cores: int = 1
    tile: int = 1
    flops_8bit: float = 0.0
    hides: tuple[str, ...] = ()
    options: Options = field(default_factory=dict, hash=False)
    clock_hz: float = 0.0
    on_chip_bytes: float = 0.0
    kinds: tuple[str, ...] = field(default=(), repr=False)  # parts of JAX's `device_kind` that mean this chip

    def peak(self, itemsize: int) -> float:
        """Operations per second on numbers of `itemsize` bytes."""
        if itemsize == 1 and self.flops_8bit:
            return self.flops_8bit
        return self.flops if itemsize <= 2 else self.flops_f32


_REDUCED = ("all-gather", "reduce-scatter", "all-reduce")


# Products are not cut into rings of permutes (on v5e a train step of a GPT takes half as much again with them); the
# sparse cores of newer chips move what is gathered and reduced beside the products.
_NO_RINGS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_OFFLOADED = _NO_RINGS | {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}


def _tpu(
    tflops: float,
    gib: float,
    hbm_gb: float,
    link_gb: float,
    *,
    torus: int,
    pod: int,
    kinds: str,
    tile: int = 128,
    on_chip_mib: int = 128,
    **more: Any,
) -> Chip:
    wraps_at = 16 if torus == 2 else 4  # a v5e or v6e dimension closes at 16; larger ones are built of 4 x 4 x 4 cubes
    return Chip(
        "tpu", tflops * 1e12, tflops * 1e12, gib * GiB, hbm_gb * GB, link_gb * GB, 6.25 * GB,
        torus=torus, wraps_at=wraps_at, pod=pod, tile=tile, kinds=tuple(kinds.split("|")),
        on_chip_bytes=on_chip_mib * 2**20, **more,
    )  # fmt: skip


def _gpu(tflops: float, gb: float, hbm_gb: float, link_gb: float, net_gb: float, *, domain: int, kinds: str) -> Chip:
    return Chip(
        "cuda", tflops * 1e12, tflops / 2 * 1e12, gb * GB, hbm_gb * GB, link_gb * GB, net_gb * GB, 5.0, 15.0,
        domain=domain, tile=64, hides=_REDUCED, flops_8bit=2e12 * tflops, kinds=tuple(kinds.split("|")),
    )  # fmt: skip


CHIPS: Mapping[str, Chip] = {
    "v4": _tpu(275, 30.75, 1228, 45, torus=3, pod=4096, kinds="v4", clock_hz=1.05e9, options=_NO_RINGS),
    "v5e": _tpu(
        197,
        15.75,
        819,
        45,
        torus=2,
        pod=256,
        kinds="v5 lite|v5e|v5litepod",
        clock_hz=1.5e9,
        flops_8bit=394e12,
        hides=("all-gather",),
        options=_NO_RINGS,
    ),
    "v5p": _tpu(
        459,
        95.74,
        2765,
        90,
        torus=3,
        pod=8960,
        kinds="v5p|v5",
        clock_hz=1.75e9,
        flops_8bit=918e12,
        hides=_REDUCED,
        options=_OFFLOADED,
    ),
    "v6e": _tpu(
        918,
        31.25,
        1640,
        90,
        torus=2,
        pod=256,
        kinds="v6 lite|v6e",
        tile=256,
        clock_hz=1.75e9,
        flops_8bit=1836e12,
        hides=_REDUCED,
        options=_OFFLOADED,
    ),
    "tpu7x": _tpu(
        1154,
        96,
        3690,
        90,
        torus=3,
        pod=9216,
        kinds="tpu7x|v7x",
        tile=256,
        cores=2,
        on_chip_mib=64,
        clock_hz=1.9e9,
        flops_8bit=2307e12,
        hides=_REDUCED,
        options=_OFFLOADED,
    ),
    "a100-40": _gpu(312, 40, 1555, 300, 25, domain=8, kinds="a100-sxm4-40gb|a100 40gb"),
    "a100-80": _gpu(312, 80, 2039, 300, 25, domain=8, kinds="a100"),
    "h100": _gpu(989, 80, 3350, 450, 50, domain=8, kinds="h100"),
    "h200": _gpu(989, 141, 4800, 450, 50, domain=8, kinds="h200"),
    "b200": _gpu(2250, 180, 8000, 900, 50, domain=8, kinds="b200"),
    "gb200": _gpu(2500, 186, 8000, 900, 50, domain=72, kinds="gb200"),
    "cpu": Chip("cpu", 3e10, 3e10, 4 * GiB, 2e9, 1.5e9, 1e9, 30.0, 100.0, domain=1 << 20),
}
ALIASES: Mapping[str, str] = {"a100": "a100-80", "v5litepod": "v5e", "v7x": "tpu7x", "ironwood": "tpu7x"}
# What a device of an unknown kind is taken for.
STAND_INS: Mapping[str, str] = {"tpu": "v5e", "gpu": "a100-80", "cuda": "a100-80", "rocm": "a100-80"}


def chip_name(kind: str) -> str | None:
    """The chip that JAX's `device_kind` means, None where it is not known (a CPU is not)."""
    found = [(len(part), name) for name, chip in CHIPS.items() for part in chip.kinds if part in kind.lower()]
    return max(found)[1] if found else None


PEAK_REACHED = 0.95  # of a chip's operations per second by large products


BANDWIDTH_REACHED = 0.8  # of its memory's
