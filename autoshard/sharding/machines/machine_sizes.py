"""Lists alternatives to a target: larger machines of the same chip, and machines of other chips with as many devices.

TPU    slices of doubling size, as Google Cloud offers them, up to 16x16 or 16x16x16 chips; a target of several
slices gets more slices of the same size
GPU    powers of two on one switch, then up to 128 hosts
file   a multiple of the outermost dimension, up to 64 times its size
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.sharding.machines.chips import ALIASES, CHIPS, Chip
from autoshard.sharding.machines.constants import (
    LARGEST_TORUS_SIDE,
    MAX_FILE_TARGET_GROWTH,
    MOST_DEVICES,
    MOST_HOSTS,
    MOST_ON_A_SWITCH,
    SLICE_MULTIPLES,
)
from autoshard.sharding.machines.targets import Target, find_target


def larger_machines(target: Target) -> list[Target]:
    """Machines of the target's chip with more devices, in ascending order of size."""
    name, _, shape = target.name.partition(":")
    key = ALIASES.get(name, name)
    if key not in CHIPS:
        return [_stretched(target, 2**n) for n in range(1, MAX_FILE_TARGET_GROWTH.bit_length())]
    if "*" in shape:
        slice_shape, _, slices = shape.partition("*")
        multiples = [n for n in SLICE_MULTIPLES if target.devices * n <= MOST_DEVICES]
        return [find_target(f"{name}:{slice_shape}*{int(slices) * n}") for n in multiples]
    return [t for t in map(find_target, sizes(key, CHIPS[key])) if t.devices > target.devices]


def machines_with_more_memory(target: Target) -> list[Target]:
    """Machines of the same platform and number of devices with more memory per device, the smallest memory first."""
    chips = sorted(CHIPS.items(), key=lambda item: item[1].memory_bytes)
    found = []
    for key, chip in chips:
        if chip.platform == target.platform and chip.memory_bytes > target.chip.memory_bytes:
            found += [t for t in map(find_target, sizes(key, chip)) if t.devices == target.devices]
    return found


def sizes(key: str, chip: Chip) -> list[str]:
    """The target names of a chip's machines, in ascending order of size."""
    if chip.torus:
        return [f"{key}:{'x'.join(map(str, shape))}" for shape in _tori(chip.torus)]
    most = min(chip.domain, MOST_ON_A_SWITCH)
    sizes_below = [2**n for n in range(most.bit_length()) if 2**n < most]
    hosts = [2**n for n in range(1, MOST_HOSTS.bit_length())] if chip.domain == most else []
    return [f"{key}:{n}" for n in (*sizes_below, most)] + [f"{key}:{n}x{most}" for n in hosts]


def _tori(dims: int) -> Iterator[tuple[int, ...]]:
    """Shapes from one board of 2 x 2 chips (in two dimensions, from a single chip), doubling the shortest dimension."""
    if dims == 2:
        yield (1, 1)
    shape = [2, 2, *[1] * (dims - 2)]
    while True:
        yield tuple(shape)
        if min(shape) == LARGEST_TORUS_SIDE:
            return
        shape[max(range(dims), key=lambda d: (-shape[d], d))] *= 2  # the last of the shortest dimensions
        if min(shape) > 1:
            shape.sort()


def _stretched(target: Target, times: int) -> Target:
    """The target with its outermost dimension `times` as large."""
    first, *rest = target.topology.dims
    topology = replace(target.topology, dims=(replace(first, size=first.size * times), *rest))
    return Target(f"{target.name} with {first.name} = {first.size * times}", target.chip, topology)
