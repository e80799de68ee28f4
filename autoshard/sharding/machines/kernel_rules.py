"""The figures of a machine that decide the block sizes of kernels, and the blocks that a plan stores.

shape   QUERIESxKEYSxFEATURESxVALUE_FEATURESxITEMSIZE of a call of splash attention
blocks  the eight sizes of `SplashBlocks`: forward, gradients of keys and values, gradient of queries
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.kernels.block_choice import BlockRules, Shape
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED
from autoshard.sharding.machines.device_mesh import MeshLike, find_machine
from autoshard.sharding.machines.on_chip_memory import VMEM_OPTION, scoped_bytes
from autoshard.sharding.machines.option_requests import Part

Blocks = Mapping[str, tuple[int, ...]]


def block_rules(
    mesh: MeshLike | None, target: str | None, request: Sequence[Part] = (), kept: Blocks | None = None
) -> BlockRules | None:
    """Return the rules for a machine under requested compiler options; None for the defaults.

    Args:
        mesh: see `autoshard.plan`.
        target: see `autoshard.plan`.
        request: the requested compiler options.
        kept: the blocks of a plan that already exists.
    """
    old = tuple((read_shape(text), read_blocks(sizes)) for text, sizes in (kept or {}).items())
    chip = find_machine(mesh, target, request).target.chip
    if chip.platform != "tpu" or not str(chip.options.get(VMEM_OPTION, "")).isdecimal():
        return BlockRules(kept=old) if old else None
    size = scoped_bytes(chip)
    flops, bandwidth = chip.flops * chip.efficiency, chip.memory_bandwidth * BANDWIDTH_REACHED
    return BlockRules(size, flops, chip.vector_ops, bandwidth, old)


def read_shape(text: str) -> Shape:
    """Read the shape of a call."""
    queries, keys, d, e, itemsize = map(int, text.split("x"))
    return queries, keys, d, e, itemsize


def read_blocks(sizes: Sequence[int]) -> SplashBlocks:
    """Read the block sizes of a call."""
    a, b, c, d, e, f, g, h = sizes
    return SplashBlocks((a, b, c), (d, e, f), (g, h))


def written(blocks: SplashBlocks) -> tuple[int, ...]:
    """Write the block sizes of a call."""
    return (*blocks.forward, *blocks.dkv, *blocks.dq)
