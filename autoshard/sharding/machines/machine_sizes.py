"""The machines that a chip comes in: larger ones of a target's kind, and others with as many devices.

TPU    slices as Google Cloud sells them, each twice the one before, up to the largest of the chip (16x16 of v5e and
v6e, 16x16x16 of those in three dimensions); several slices become more slices
GPU    powers of two on one switch, then hosts, up to 128 of them
file   more of its outermost dimension, up to 64 times as much
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.sharding.machines.chips import ALIASES, CHIPS, Chip
from autoshard.sharding.machines.targets import MOST_DEVICES, Target, find_target
from autoshard.sharding.machines.topology import Topology

LONGEST = 16  # chips along a torus
MOST_HOSTS = 128
MOST_ON_A_SWITCH = 1024  # where any number could hang on one: processors
MOST_TIMES = 64  # as many devices as a machine of a file has


def larger_machines(target: Target) -> list[Target]:
    """Machines of the target's kind with more devices, the smallest first."""
    name, _, shape = target.name.partition(":")
    key = ALIASES.get(name, name)
    if key not in CHIPS:
        return [_stretched(target, 2**n) for n in range(1, MOST_TIMES.bit_length())]
    if "*" in shape:
        one, _, slices = shape.partition("*")
        times = [2**n for n in (1, 2, 3) if target.devices * 2**n <= MOST_DEVICES]
        return [find_target(f"{name}:{one}*{int(slices) * n}") for n in times]
    return [t for t in map(find_target, sizes(key, CHIPS[key])) if t.devices > target.devices]


def machines_with_more_memory(target: Target) -> list[Target]:
    """Machines of as many devices of the same platform with more memory on each, the least of it first."""
    chips = sorted(CHIPS.items(), key=lambda item: item[1].memory_bytes)
    found = []
    for key, chip in chips:
        if chip.platform == target.platform and chip.memory_bytes > target.chip.memory_bytes:
            found += [t for t in map(find_target, sizes(key, chip)) if t.devices == target.devices]
    return found


def sizes(key: str, chip: Chip) -> list[str]:
    """The names of a chip's machines, the smallest first."""
    if chip.torus:
        return [f"{key}:{'x'.join(map(str, shape))}" for shape in _tori(chip.torus)]
    most = min(chip.domain, MOST_ON_A_SWITCH)
    near = [2**n for n in range(most.bit_length()) if 2**n < most]
    hosts = [2**n for n in range(1, MOST_HOSTS.bit_length())] if chip.domain == most else []
    return [f"{key}:{n}" for n in (*near, most)] + [f"{key}:{n}x{most}" for n in hosts]


def _tori(dims: int) -> Iterator[tuple[int, ...]]:
    """From one board of 2 x 2 (in two dimensions also a single chip), the shortest dimension doubled each time."""
    if dims == 2:
        yield (1, 1)
    shape = [2, 2, *[1] * (dims - 2)]
    while True:
        yield tuple(shape)
        if min(shape) == LONGEST:
            return
        shape[max(range(dims), key=lambda d: (-shape[d], d))] *= 2  # of those that are alike the last
        if min(shape) > 1:
            shape.sort()


def _stretched(target: Target, times: int) -> Target:
    first, *rest = target.topology.dims
    dims = (replace(first, size=first.size * times), *rest)
    return Target(f"{target.name} with {first.name} = {first.size * times}", target.chip, Topology(dims))
