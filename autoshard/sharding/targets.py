"""Machines: what one device computes, holds and sends, and how many of them there are.

Sources: the makers' data sheets (Google Cloud TPU system architecture pages; NVIDIA A100, H100, H200 data sheets);
one-way link bandwidth. A CPU target stands for virtual devices on one host: its figures are only used to rank plans.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autoshard.errors import AutoshardError

GiB = 2**30


class TargetError(AutoshardError):
    """A target that does not exist or cannot be read."""


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        flops: peak operations per second at 16 bits.
        flops_f32: the same at 32 bits.
        memory_bytes: memory of a device, in bytes.
        memory_bandwidth: bytes per second between it and the compute units.
        link_bandwidth: bytes per second that a device sends to its peers, one way.
        network_bandwidth: bytes per second that a device sends to another host's.
        link_latency_us: time before the first byte of a collective arrives, in microseconds.
    """

    flops: float
    flops_f32: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    link_latency_us: float = 1.0


CHIPS: dict[str, Chip] = {
    "v4": Chip(275e12, 69e12, 32 * GiB, 1.2e12, 90e9, 6e9),
    "v5e": Chip(197e12, 49e12, 16 * GiB, 0.82e12, 90e9, 6e9),
    "v5p": Chip(459e12, 115e12, 95 * GiB, 2.77e12, 180e9, 6e9),
    "v6e": Chip(918e12, 230e12, 32 * GiB, 1.64e12, 180e9, 12e9),
    "a100": Chip(312e12, 156e12, 80 * GiB, 2.0e12, 300e9, 25e9, 5.0),
    "h100": Chip(989e12, 494e12, 80 * GiB, 3.35e12, 450e9, 50e9, 5.0),
    "h200": Chip(989e12, 494e12, 141 * GiB, 4.8e12, 450e9, 50e9, 5.0),
    "b200": Chip(2250e12, 1125e12, 180 * GiB, 8.0e12, 900e9, 50e9, 5.0),
    "cpu": Chip(5e10, 5e10, 4 * GiB, 1e10, 5e9, 1e9, 20.0),
}

# A part of JAX's device kind, and the chip that it is; the first that fits.
_KINDS = {
    "v5 lite": "v5e", "v5e": "v5e", "v6 lite": "v6e", "v6e": "v6e", "v5p": "v5p", "v5": "v5p", "v4": "v4",
    "b200": "b200", "h200": "h200", "h100": "h100", "a100": "a100",
}  # fmt: skip
# What a device of an unknown kind is taken for.
_STAND_INS = {"tpu": "v5e", "gpu": "a100", "cuda": "a100", "rocm": "a100"}


@dataclass(frozen=True)
class Target:
    """A machine: its chip and how many, `inner` of them behind the fast links."""

    name: str
    chip: Chip
    devices: int
    inner: int

    @property
    def platform(self) -> str:
        """The JAX platform: tpu, cuda or cpu."""
        kind = self.name.partition(":")[0]
        return "cpu" if kind == "cpu" else "tpu" if kind.startswith("v") else "cuda"

    def bandwidth(self, inner_ways: int, n: int) -> float:
        """Bytes per second of a collective over `n` devices, the axes before it spanning `inner_ways`."""
        return self.chip.link_bandwidth if inner_ways * n <= self.inner else self.chip.network_bandwidth

    @property
    def flops_per_byte(self) -> float:
        """Operations that a device does while one byte crosses a link."""
        return self.chip.flops / self.chip.link_bandwidth


def find_target(name: str) -> Target:
    """The machine called `name`: `v5p:4x4x4` (torus), `h100:4x8` (hosts x GPUs), `cpu:8`, slices with `*2`.

    Raises:
        TargetError: it does not exist.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)(?:\*(\d+))?", name)
    if not match or match[1] not in CHIPS:
        raise TargetError(
            f"target '{name}' does not exist; write CHIP:SHAPE, such as v5p:4x4x4, h100:4x8 or cpu:8. "
            f"Chips: {', '.join(CHIPS)}"
        )
    shape = [int(n) for n in match[2].split("x")]
    slices = int(match[3] or 1)
    if min(*shape, slices, 1) < 1:
        raise TargetError(f"target '{name}' has no devices")
    inner = shape[-1] if match[1] in ("a100", "h100", "h200", "b200") else math.prod(shape)
    return Target(name, CHIPS[match[1]], math.prod(shape) * slices, inner)


def chip_name(kind: str) -> str | None:
    """The chip that a `device_kind` names, None where it is not known (a CPU is not)."""
    return next((name for part, name in _KINDS.items() if part in kind.lower()), None)


def target_for(platform: str, kind: str, count: int) -> Target:
    """The machine that attached devices make up.

    Args:
        platform: `jax.devices()[0].platform`.
        kind: its `device_kind`.
        count: how many there are.
    """
    chip = chip_name(kind) or _STAND_INS.get(platform, "cpu")
    return Target(f"{chip}:{count}", CHIPS[chip], count, count)
