"""Which devices each axis of a mesh spans, and the ways to choose them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from autoshard._shown import shown
from autoshard.sharding.machines.links import Links
from autoshard.sharding.machines.topology import Dim, Piece, Pieces, Topology
from autoshard.spmdrules.core.placement import ReshardKind


@shown
@dataclass(frozen=True)
class DeviceAssignment:
    """The devices that each mesh axis spans.

    Attributes:
        topology: the topology.
        pieces: mesh axis -> its pieces, major to minor.
    """

    topology: Topology
    pieces: Mapping[str, Pieces]
    _links: dict = field(default_factory=dict, compare=False, repr=False)

    def time_us(self, kind: ReshardKind, axes: Iterable[str], local_bytes: float) -> float:
        """Microseconds of a collective over these mesh axes; see `Topology.time_us`."""
        latency_us, us_per_byte = self.topology.linear_time(kind, self.pieces_of(axes))
        return latency_us + us_per_byte * local_bytes

    def shift_us(self, axes: Iterable[str], local_bytes: float) -> float:
        """Microseconds in which each device along these mesh axes sends to the next one; see `Topology.shift_us`."""
        return self.topology.shift_us(self.pieces_of(axes), local_bytes)

    def links(self, requested: ReshardKind, axes: tuple[str, ...]) -> Links:
        """What a collective over these mesh axes becomes on their links."""
        found = self._links.get((requested, axes))
        if found is None:
            found = self._links[requested, axes] = self.topology.links(requested, self.pieces_of(axes))
        return found

    def pieces_of(self, axes: Iterable[str]) -> Pieces:
        """The pieces of a group over these mesh axes."""
        return tuple(p for a in axes for p in self.pieces[a])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each position of the mesh, in row-major order, the row-major index of its device in the topology."""
        stride_of_dim = [math.prod(d.size for d in self.topology.dims[i + 1 :]) for i in range(len(self.topology.dims))]
        order = [0]
        for pieces in self.pieces.values():
            for p in pieces:
                step = p.stride * stride_of_dim[p.dim]
                order = [base + i * step for base in order for i in range(p.size)]
        return tuple(order)

    def text(self) -> dict[str, str]:
        """Return the pieces of each mesh axis as text.

        `x:4 y:2/2` means 4 devices of dimension x, and 2 devices of dimension y with stride 2.
        """
        names = [d.name for d in self.topology.dims]
        return {
            a: " ".join(f"{names[p.dim]}:{p.size}" + (f"/{p.stride}" if p.stride > 1 else "") for p in ps)
            for a, ps in self.pieces.items()
        }


@lru_cache(maxsize=4096)
def assign(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> DeviceAssignment:
    """The default assignment: the last mesh axis on the nearest devices."""
    return next(assignments(topology, dict(mesh), [a for a, _ in reversed(mesh)]))


def assignments(topology: Topology, mesh: Mapping[str, int], axis_order: Sequence[str]) -> Iterator[DeviceAssignment]:
    """Yields the device assignments of a mesh, without duplicates.

    The axes choose their pieces in the order of `axis_order`, near dimensions before far ones. Of several equal
    dimensions only the nearest is tried. An axis fills whole dimensions as far as it can, or it spans a square of a
    torus. If the sizes do not fit the dimensions (an axis of 3 on 4 x 4), the only assignment puts the axes in
    row-major order on all devices and prices them as one switch with the figures of the slowest dimension.
    """
    yielded: set[tuple[tuple[str, Pieces], ...]] = set()
    for found in _all_assignments(topology, [(a, mesh[a]) for a in axis_order], {}, {}):
        key = tuple((a, found[a]) for a in mesh)
        if key not in yielded:
            yielded.add(key)
            yield DeviceAssignment(topology, dict(key))
    if not yielded:
        each_us = max(d.each_us for d in topology.dims)
        flat = Dim("device", topology.devices, "switch", *_slowest(topology), each_us=each_us)
        pieces: dict[str, Pieces] = {}
        stride = 1
        for a in reversed(list(mesh)):
            pieces[a] = (Piece(0, mesh[a], stride),)
            stride *= mesh[a]
        yield DeviceAssignment(Topology((flat,)), {a: pieces[a] for a in mesh})


def _slowest(topology: Topology) -> tuple[float, float]:
    """The bandwidth and the latency of the slowest dimension."""
    slow = min((d for d in topology.dims if d.size > 1), key=lambda d: d.bandwidth, default=topology.dims[0])
    return slow.bandwidth, slow.latency_us


def _all_assignments(
    topology: Topology, axes: Sequence[tuple[str, int]], taken: Mapping[int, int], found: Mapping[str, Pieces]
) -> Iterator[dict[str, Pieces]]:
    """Yields every way to assign pieces to the axes in order; `taken[dim]` is the stride that earlier axes leave."""
    if not axes:
        yield dict(found)
        return
    (axis, size), *rest = axes
    for pieces in _pieces(topology, size, taken):
        taken_now = dict(taken)
        for p in pieces:
            taken_now[p.dim] = taken_now.get(p.dim, 1) * p.size
        yield from _all_assignments(topology, rest, taken_now, {**found, axis: _slices_first(topology, pieces)})


def _slices_first(topology: Topology, pieces: Pieces) -> Pieces:
    """The same pieces with those of the slices as the major ones, so that gathers run within the slices, too."""
    return tuple(sorted(pieces, key=lambda p: p.dim != 0)) if topology.has_slices else pieces


def _pieces(topology: Topology, size: int, taken: Mapping[int, int]) -> Iterator[Pieces]:
    """Yields ways to take `size` devices as pieces, major to minor; each piece divides the free part of a dimension."""
    if size == 1:
        yield ()
        return
    options: list[Pieces] = []
    tried: set[tuple[Dim, int]] = set()  # equal dimensions are interchangeable
    for number in range(len(topology.dims) - 1, -1, -1):
        dim, stride = topology.dims[number], taken.get(number, 1)
        free = dim.size // stride
        shared = math.gcd(size, free)
        key = (replace(dim, name=""), stride)
        if shared == 1 or key in tried:
            continue
        tried.add(key)
        piece = Piece(number, shared, stride)
        for others in _pieces(topology, size // shared, {**taken, number: stride * shared}):
            options.append((*others, piece))
    yield from options
    yield from _squares(topology, size, taken)


def _squares(topology: Topology, size: int, taken: Mapping[int, int]) -> Iterator[Pieces]:
    """Yields squares of `size` devices in two dimensions of a torus that have more devices.

    Devices in a square have links to each other in both dimensions. In a line, they have links in one.
    """
    side = math.isqrt(size)
    if side * side != size:
        return
    free = {n: dim.size // taken.get(n, 1) for n, dim in enumerate(topology.dims) if dim.kind == "ring"}
    dims = [n for n, left in free.items() if left > side and left % side == 0]
    tried: set[tuple[tuple[Dim, int], ...]] = set()  # equal dimensions are interchangeable
    for pair in itertools.combinations(reversed(dims), 2):
        key = tuple((replace(topology.dims[n], name=""), taken.get(n, 1)) for n in pair)
        if key not in tried:
            tried.add(key)
            yield tuple(Piece(n, side, taken.get(n, 1)) for n in reversed(pair))
