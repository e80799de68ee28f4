"""The groups of partitions of a program that runs on several slices of TPUs.

XLA compiles one module for a slice. Its `num_partitions` and its replica groups count the partitions of the slice, in
the order that they have in the whole program. Every slice runs the same collectives on its own partitions.

Collectives between slices are sends and receives over the data center network, with the devices in an attribute:

    _xla_megascale_target={{100000,200000},{100001,200001}}         groups of devices
    _xla_megascale_target={{100000->200001},{200001->100000}}       of a permute: pairs (from, to)
    _xla_megascale_target="{1,2}x{0:15}"                            each of the devices 0 to 15, of slices 1 and 2

Device 200003 is number 3 of the second slice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard._shown import shown
from autoshard.sharding.hlo.constants import DEVICES_OF_A_SLICE
from autoshard.sharding.hlo.replica_groups import Groups

_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|\{((?:\{[^}]*\},?)*)\})')
_RANGE = re.compile(r"\{([\d,]+)\}x\{(\d+):(\d+)\}")


@shown
@dataclass(frozen=True)
class Slices:
    """The partitions of each slice.

    Attributes:
        order: for each partition of the whole program the number of its device, slice by slice.
        count: the number of slices.
    """

    order: tuple[int, ...]
    count: int

    @property
    def size(self) -> int:
        """The number of devices of a slice."""
        return len(self.order) // self.count

    @cached_property
    def partitions(self) -> Sequence[Sequence[int]]:
        """For each slice its partitions, in the order in which its module numbers them."""
        return [[p for p, device in enumerate(self.order) if device // self.size == n] for n in range(self.count)]

    def in_all_slices(self, groups: Groups) -> Groups:
        """Groups of partitions of the whole program, for groups of the module of a slice."""
        return tuple(tuple(own[p] for p in group) for own in self.partitions for group in groups)

    def between_slices(self, attributes: str) -> Groups:
        """The groups of partitions, or pairs (from, to), of a send between slices.

        Args:
            attributes: the text of the instruction's attributes. Without devices that are known, all slices take part.
        """
        found = _TARGET.search(attributes)
        if found and (ranges := _RANGE.search(found[1] or "")):
            slices, first, last = [int(n) - 1 for n in ranges[1].split(",")], int(ranges[2]), int(ranges[3])
            devices = [[(n, d) for n in slices] for d in range(first, last + 1)]
        else:
            listed = re.findall(r"\{([^}]*)\}", (found[2] or "") if found else "")
            numbers = [[int(n) for n in re.findall(r"\d+", group)] for group in listed]
            devices = [[(n // DEVICES_OF_A_SLICE - 1, n % DEVICES_OF_A_SLICE) for n in group] for group in numbers]
        known = {device: partition for partition, device in enumerate(self.order)}
        if not devices or any(not (0 <= n < self.count and d < self.size) for group in devices for n, d in group):
            devices = [[(n, d) for n in range(self.count)] for d in range(self.size)]
        return tuple(tuple(known[n * self.size + d] for n, d in group) for group in devices)
