"""The least time of a collective over groups of a size, wherever the devices of a group are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from autoshard._shown import shown
from autoshard.sharding.machines.device_assignments import assign
from autoshard.sharding.machines.links import Links
from autoshard.sharding.machines.topology import Dim, Piece, Pieces, Topology
from autoshard.spmdrules.core.placement import ReshardKind


@shown
class BestLinks(NamedTuple):
    """The least time of a collective, as a function of its bytes.

    Attributes:
        lines: for several places of its groups: microseconds without any bytes, and for each byte of each device's
            operand.
        links: its links in all places.
    """

    lines: tuple[tuple[float, float], ...]
    links: tuple[Links, ...]

    def time_us(self, local_bytes: float) -> float:
        """Microseconds of one run.

        Args:
            local_bytes: bytes of each device's operand.
        """
        return min([latency_us + us_per_byte * local_bytes for latency_us, us_per_byte in self.lines])


@lru_cache(maxsize=4096)  # more than one search needs; only speed depends on it
def best_links(topology: Topology, requested: ReshardKind, devices: int) -> BestLinks:
    """Return the least time of a collective over groups of a number of devices.

    No device assignment gives less. The time of a collective depends on how many devices of each dimension a group
    spans, and how far they are apart. All possibilities are compared.

    Args:
        topology: the topology.
        requested: the kind of collective.
        devices: the number of devices of each group.
    """
    every = {topology.links(requested, pieces) for pieces in _places(topology.dims, devices)}
    flat = assign(topology, (("group", devices), ("rest", 1 + topology.devices)))  # sizes that fit no dimensions
    every.add(flat.links(requested, ("group",)))
    lines = {(one.latency_us, one.us_per_byte * one.factor) for one in every}
    least = [one for one in lines if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in lines)]
    return BestLinks(tuple(sorted(least)), tuple(every))


def _places(dims: tuple[Dim, ...], devices: int) -> Iterator[Pieces]:
    """Yield the pieces of each group of `devices` devices: how many of each dimension, and how far apart."""
    options = [
        [Piece(n, size, stride) for size in _divisors(dim.size) if devices % size == 0
         for stride in (_divisors(dim.size // size) if size > 1 else [1])]
        for n, dim in enumerate(dims)
    ]  # fmt: skip
    for pieces in itertools.product(*options):
        if math.prod([piece.size for piece in pieces]) == devices:
            spanned = tuple(piece for piece in pieces if piece.size > 1)
            yield from {spanned, spanned[::-1]}  # a network between slices is used in the order of the pieces


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
