"""How devices are connected, which devices a mesh axis spans, and how long a collective takes on them.

A topology is a list of dimensions, outermost first: slices, hosts, the dimensions of a torus, the cores of a chip. A
mesh axis is assigned pieces of dimensions: a piece is `size` devices of one dimension, `stride` apart. Units: bytes,
bytes per second, microseconds.

A collective runs over a group of n devices. B is the bytes of one device: after an all-gather, before any other kind.

    bytes sent per device   all-gather, reduce-scatter, all-to-all: (n - 1)/n B; all-reduce: twice that; permute: B
    bandwidth of a piece    on a ring, that of 2 links if the piece goes all the way around, else of 1 link, divided by
                            the stride, because that many groups share each link; on a switch, that of one device's link
                            The devices of a chip share its links to a torus: if each group has one device of a chip,
                            a group gets 1/(devices of the chip) of the bandwidth
    bandwidth of a group    dimensions of one torus work in parallel: the sum over its pieces. Networks of different
                            speeds work one after the other: the outer one carries 1/(size of the inner) of the bytes
    time                    latency of all hops along the longest piece + bytes sent / bandwidth
    shift                   each device sends to the next one over one link: the latency of a hop + bytes / bandwidth
    permute                 some devices send across every dimension of the group: the latencies of all pieces add up,
                            and the slowest piece limits the bandwidth
    all-to-all on a torus   is limited by the links of a device and by the bisection of the longest dimension, see
                            `_all_to_all_us`
    on a torus, XLA:TPU     replaces some collectives by an all-reduce, see `Topology.compiled`
    between slices          see `between_slices`
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from autoshard._shown import shown
from autoshard.sharding.machines.between_slices import SLICE, flat_us, is_flat, spans_both
from autoshard.sharding.machines.links import Links
from autoshard.spmdrules.core.placement import ReshardKind, bytes_sent_per_byte


@shown
@dataclass(frozen=True)
class Dim:
    """One dimension of a topology.

    Attributes:
        name: slice, host, x, y, z, gpu, device or core.
        size: number of devices along it.
        kind: `ring` (neighbours are linked) or `switch` (all are connected).
        bandwidth: bytes per second of one link in one direction; on a switch, of one device's link to it.
        latency_us: microseconds of one hop.
        wraps: whether the last device of a ring is linked to the first.
        each_us: on a switch, additional latency in microseconds for each device after the first. CPU devices are
            threads of one process that wait for each other.
    """

    name: str
    size: int
    kind: Literal["ring", "switch"]
    bandwidth: float
    latency_us: float
    wraps: bool = False
    each_us: float = 0.0

    @property
    def link(self) -> str:
        """How the devices are connected: `switch`, `ring`, or `line` if the last is not linked to the first."""
        return self.kind if self.kind == "switch" or self.wraps else "line"


@shown
@dataclass(frozen=True)
class Piece:
    """`size` devices of the dimension numbered `dim`, `stride` apart."""

    dim: int
    size: int
    stride: int


Pieces = tuple[Piece, ...]


@shown
@dataclass(frozen=True)
class Topology:
    """Devices in row-major order of `dims`; neighbours along the last dimension are nearest.

    Attributes:
        dims: its dimensions, outermost first.
        keeps_gathers: whether the compiler keeps an all-gather over three dimensions of a torus as it is.
        keeps_reduce_scatters: whether the compiler emits reduce-scatters on a torus.
    """

    dims: tuple[Dim, ...]
    keeps_gathers: bool = False
    keeps_reduce_scatters: bool = True

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(d.size for d in self.dims)

    def time_us(self, kind: ReshardKind, pieces: Pieces, local_bytes: float) -> float:
        """Microseconds of a collective over the devices of `pieces`.

        Args:
            kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`.
            pieces: the devices of one group.
            local_bytes: bytes of each device's operand (for an all-gather: its shard).
        """
        merged = self.merged(pieces)
        if not merged:
            return 0.0
        sharing = self._groups_of_a_chip(merged)
        whole = local_bytes * math.prod(p.size for p in merged) if kind == "all-gather" else local_bytes
        if kind == "collective-permute":
            slowest = min(self._piece_bandwidth(p, sharing) for p in merged)
            return sum(map(self._latency_us, merged)) + local_bytes / slowest * 1e6
        if self.has_slices and spans_both(spanned := [p.dim for p in pieces if p.size > 1]):
            if is_flat(kind, spanned):
                return self.flat_us(kind, math.prod(p.size for p in merged), local_bytes)
            kind = "all-reduce" if kind == "reduce-scatter" else kind
        if kind == "all-to-all":
            return sum(self._all_to_all_us(group, whole, sharing) for _, group in self._tiers(merged))
        one_pass_us, inner = 0.0, 1
        for _, group in self._tiers(merged):
            n = math.prod(p.size for p in group)
            bandwidth = sum(self._piece_bandwidth(p, sharing) for p in group)
            one_pass_us += max(map(self._latency_us, group)) + (n - 1) / n * whole / inner / bandwidth * 1e6
            inner *= n
        return one_pass_us * (2 if kind == "all-reduce" else 1)

    def flat_us(self, kind: ReshardKind, devices: int, local_bytes: float) -> float:
        """Microseconds of a collective whose bytes all cross the network between slices."""
        return flat_us(kind, devices, local_bytes, self.dims[0].bandwidth, self.dims[0].latency_us)

    @property
    def has_slices(self) -> bool:
        """Whether the outermost dimension is a network between slices of TPUs. Other machines have no torus."""
        first, *rest = self.dims
        return first.name == SLICE and first.size > 1 and any(dim.kind == "ring" for dim in rest)

    def shift_us(self, pieces: Pieces, local_bytes: float) -> float:
        """Microseconds in which each device of a group sends to the next one, as on a ring.

        One link carries it, in one direction. Where the devices form no closed ring, the message of the last one passes
        all others on the way back to the first.
        """
        merged = self.merged(pieces)
        if not merged:
            return 0.0
        dims = [(self.dims[p.dim], p) for p in merged]
        hops = [
            dim.latency_us * (1 if dim.kind == "switch" or self._closed(p) else (p.size - 1) * p.stride)
            for dim, p in dims
        ]
        sharing = self._groups_of_a_chip(merged)
        slowest = min(dim.bandwidth / (1 if dim.kind == "switch" else p.stride * sharing) for dim, p in dims)
        return max(hops) + local_bytes / slowest * 1e6

    def compiled(self, kind: ReshardKind, pieces: Pieces, local_bytes: float) -> tuple[ReshardKind, float]:
        """The collective that XLA:TPU emits for a requested one, and the bytes of its operand on each device.

        On a torus, a reduce-scatter over three dimensions, or over two lines of equal length, becomes an all-reduce
        whose result is sliced. This holds for all reduce-scatters if the compiler emits none. An all-gather over three
        dimensions becomes an all-reduce of shards padded with zeros, unless the compiler keeps it. Pieces of two
        devices do not count as dimensions here.
        """
        rings = [p for p in self.merged(pieces) if self.dims[p.dim].kind == "ring" and p.size > 2]
        lines = [p for p in rings if not self._closed(p)]
        square = len(lines) > 1 and len({p.size for p in lines}) == 1
        if kind == "reduce-scatter" and (len(rings) > 2 or square or not self.keeps_reduce_scatters):
            return "all-reduce", local_bytes
        if kind == "all-gather" and len(rings) > 2 and not self.keeps_gathers:
            return "all-reduce", local_bytes * math.prod(p.size for p in pieces)
        return kind, local_bytes

    def _closed(self, piece: Piece) -> bool:
        dim = self.dims[piece.dim]
        return dim.wraps and piece.size * piece.stride == dim.size

    def merged(self, pieces: Pieces) -> list[Piece]:
        """Merges the pieces of each dimension into one, so that two halves of a ring count as a closed ring."""
        of_dim: dict[int, list[Piece]] = defaultdict(list)
        for p in pieces:
            if p.size > 1:
                of_dim[p.dim].append(p)
        return [Piece(d, math.prod(p.size for p in ps), min(p.stride for p in ps)) for d, ps in of_dim.items()]

    def _tiers(self, pieces: Sequence[Piece]) -> list[tuple[float, list[Piece]]]:
        """Groups pieces by bandwidth in descending order; dimensions of one torus form one group."""
        tiers: dict[tuple[float, str], list[Piece]] = defaultdict(list)
        for p in pieces:
            dim = self.dims[p.dim]
            tiers[dim.bandwidth, dim.kind if dim.kind == "ring" else dim.name].append(p)
        return [(speed, group) for (speed, _), group in sorted(tiers.items(), key=lambda item: -item[0][0])]

    def _groups_of_a_chip(self, pieces: Sequence[Piece]) -> int:
        """The number of groups that use the same links of a torus, through different devices of the same chips."""
        rings = [i for i, dim in enumerate(self.dims) if dim.kind == "ring"]
        spanned = {p.dim: p.size for p in pieces}
        inner = range(rings[-1] + 1, len(self.dims)) if rings else ()
        return math.prod(self.dims[i].size // spanned.get(i, 1) for i in inner)

    def _piece_bandwidth(self, piece: Piece, sharing: int) -> float:
        dim = self.dims[piece.dim]
        if dim.kind == "switch":
            return dim.bandwidth
        return dim.bandwidth * (2 if self._closed(piece) else 1) / (piece.stride * sharing)

    def _latency_us(self, piece: Piece) -> float:
        dim = self.dims[piece.dim]
        if dim.kind == "switch":
            return dim.latency_us + dim.each_us * (piece.size - 1)
        hops = piece.size // 2 if self._closed(piece) else piece.size - 1
        return dim.latency_us * hops * piece.stride

    def _all_to_all_us(self, group: Sequence[Piece], local_bytes: float, sharing: int) -> float:
        """Microseconds of an all-to-all.

        On a torus, the links of a device or the bisection of the longest dimension limit it. A device sends
        (n - 1)/n of its B bytes over its links in all dimensions. Of n devices, n B / 4 bytes cross the bisection in
        each direction. They are carried by n / longest links, or by twice as many where the dimension is a closed ring.
        """
        n = math.prod(p.size for p in group)
        longest = max(group, key=lambda p: p.size / self._piece_bandwidth(p, sharing))
        bandwidth = self._piece_bandwidth(longest, sharing)
        if self.dims[longest.dim].kind == "switch":
            return self._latency_us(longest) + (n - 1) / n * local_bytes / bandwidth * 1e6
        sent = (n - 1) / n / sum(self._piece_bandwidth(p, sharing) for p in group)
        return self._latency_us(longest) + max(longest.size / 4 / bandwidth, sent) * local_bytes * 1e6


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
    _times: dict = field(default_factory=dict, compare=False, repr=False)
    _links: dict = field(default_factory=dict, compare=False, repr=False)

    def time_us(self, kind: ReshardKind, axes: Iterable[str], local_bytes: float) -> float:
        """Microseconds of a collective over these mesh axes; see `Topology.time_us`."""
        axes = tuple(axes)
        found = self._times.get((kind, axes))
        if found is None:  # the time is linear in the bytes, so two points determine it
            over = self.pieces_of(axes)
            latency = self.topology.time_us(kind, over, 0.0)
            found = self._times[kind, axes] = latency, (self.topology.time_us(kind, over, 1e9) - latency) / 1e9
        return found[0] + found[1] * local_bytes

    def shift_us(self, axes: Iterable[str], local_bytes: float) -> float:
        """Microseconds in which each device along these mesh axes sends to the next one; see `Topology.shift_us`."""
        return self.topology.shift_us(self.pieces_of(axes), local_bytes)

    def links(self, requested: ReshardKind, axes: tuple[str, ...]) -> Links:
        """What a collective over these mesh axes becomes on their links."""
        found = self._links.get((requested, axes))
        if found is None:
            over = self.pieces_of(axes)
            kind, factor = self.topology.compiled(requested, over, 1.0)
            devices, merged = math.prod(p.size for p in over), self.topology.merged(over)
            self.time_us(kind, axes, 0.0)  # notes both
            latency_us, us_per_byte = self._times[kind, axes]
            box_dims = len(merged) if all(p.stride == 1 for p in merged) else 0
            sent = bytes_sent_per_byte(kind, devices)
            found = Links(kind, factor, devices, sent, latency_us, us_per_byte, box_dims)
            self._links[requested, axes] = found
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
        """Mesh axis -> its pieces as text, such as `x:4 y:2/2` (of dimension y, 2 devices with stride 2)."""
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
