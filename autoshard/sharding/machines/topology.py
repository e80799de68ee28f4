"""How devices are connected, and how long a collective takes on a group of them.

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

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
        keeps_gathers: whether the compiler keeps an all-gather over several dimensions of a torus as it is.
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

    @cached_property
    def _linear_times(self) -> dict[tuple[ReshardKind, Pieces], tuple[float, float]]:
        return {}

    @cached_property
    def _links(self) -> dict[tuple[ReshardKind, Pieces], Links]:
        return {}

    def linear_time(self, kind: ReshardKind, pieces: Pieces) -> tuple[float, float]:
        """Return two terms of a collective's time: microseconds without any bytes, and microseconds a byte.

        Bytes are those of each device's operand.
        """
        found = self._linear_times.get((kind, pieces))
        if found is None:  # the time is linear in the bytes, so two points determine it
            latency = self.time_us(kind, pieces, 0.0)
            found = self._linear_times[kind, pieces] = latency, (self.time_us(kind, pieces, 1e9) - latency) / 1e9
        return found

    def links(self, requested: ReshardKind, pieces: Pieces) -> Links:
        """What a collective over the devices of `pieces` becomes on their links."""
        found = self._links.get((requested, pieces))
        if found is None:
            kind, factor = self.compiled(requested, pieces, 1.0)
            devices, merged = math.prod(p.size for p in pieces), self.merged(pieces)
            box_dims = len(merged) if all(p.stride == 1 for p in merged) else 0
            sent = bytes_sent_per_byte(kind, devices)
            found = Links(kind, factor, devices, sent, *self.linear_time(kind, pieces), box_dims)
            self._links[requested, pieces] = found
        return found

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

        A reduce-scatter over a whole torus (of one slice) becomes an all-reduce whose result is sliced, if the torus
        has three dimensions or is a square. This holds for all reduce-scatters if the compiler emits none. An
        all-gather over three dimensions becomes an all-reduce of shards padded with zeros, unless the compiler keeps
        it. Dimensions of two devices do not count here, neither those of the torus nor those of a group.
        """
        rings = [p for p in self.merged(pieces) if self.dims[p.dim].kind == "ring" and p.size > 2]
        whole = math.prod(p.size for p in pieces if self.dims[p.dim].kind == "ring") == self._torus
        alike = len(rings) > 2 or len(rings) == 2 and rings[0].size == rings[1].size
        if kind == "reduce-scatter" and (whole and alike or not self.keeps_reduce_scatters):
            return "all-reduce", local_bytes
        if kind == "all-gather" and len(rings) > 2 and not self.keeps_gathers:
            return "all-reduce", local_bytes * math.prod(p.size for p in pieces)
        return kind, local_bytes

    @cached_property
    def _torus(self) -> int:
        """The number of devices of one slice's torus."""
        return math.prod(dim.size for dim in self.dims if dim.kind == "ring")

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
