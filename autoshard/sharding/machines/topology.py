"""How devices are connected, how mesh axes are laid onto that, and how long a collective takes there.

A topology is a list of dimensions, outermost first: slices, hosts, the dimensions of a torus, the cores of a chip. A
mesh axis is laid onto pieces of them: a piece is `size` devices of one dimension, `stride` apart. Units: bytes, bytes
per second, microseconds.

    group of n devices, B = bytes that one device has (gathered: after; reduced: before)
    all-gather, reduce-scatter   (n - 1)/n B leave each device; all-reduce twice that; all-to-all (n - 1)/n B;
                                 permute B
    bandwidth of a piece         ring: 2 links where it is closed, 1 where it is a line; divided by the stride where as
                                 many groups share the links. Switch: the device's own bundle
    bandwidth of a group         dimensions of one torus work at the same time: their sum. Slower networks around it:
                                 one after the other, the outer one with 1/inner of the bytes (hierarchical)
    compiled on a torus          XLA scatters a sum over at most two dimensions of which one may be a line, and gathers
                                 over at most two; elsewhere it reduces all of it; a piece of 2 is none (`compiled`)
    all-to-all on a torus        half of all bytes cross the middle of the longest dimension, see `_exchange_us`
    time                         latency of every hop of the longest piece + bytes / bandwidth
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from autoshard._shown import shown
from autoshard.spmdrules.core.placement import ReshardKind


@shown
@dataclass(frozen=True)
class Dim:
    """One dimension of a topology.

    Attributes:
        name: slice, host, x, y, z, gpu, core.
        size: devices along it.
        kind: `ring` (neighbours are linked) or `switch` (all are).
        bandwidth: bytes per second of one link one way (of a device's bundle to a switch).
        latency_us: of one hop.
        wraps: whether the last is linked to the first.
        each_us: of a switch: more of it for each device beside the first: threads of one process wait in turn.
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
        """How its devices are joined: `switch`, `ring`, or `line` where the last is not linked to the first."""
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
    """Devices in row-major order of `dims`, the last dimension nearest."""

    dims: tuple[Dim, ...]

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(d.size for d in self.dims)

    def time_us(self, kind: ReshardKind, pieces: Pieces, local_bytes: float) -> float:
        """How long a collective takes over the devices of `pieces`.

        Args:
            kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`.
            pieces: where the group lies.
            local_bytes: what a device has before (of an all-gather: its shard).
        """
        merged = self._merged(pieces)
        if not merged:
            return 0.0
        whole = local_bytes * math.prod(p.size for p in merged) if kind == "all-gather" else local_bytes
        if kind == "collective-permute":
            return min(self._hop(p) for p in merged) + local_bytes / min(map(self._piece_bandwidth, merged)) * 1e6
        if kind == "all-to-all":
            return sum(self._exchange_us(group, whole) for _, group in self._tiers(merged))
        once, inner = 0.0, 1
        for _, group in self._tiers(merged):  # the fastest first
            n = math.prod(p.size for p in group)
            bandwidth = sum(map(self._piece_bandwidth, group))
            once += max(map(self._hop, group)) + (n - 1) / n * whole / inner / bandwidth * 1e6
            inner *= n
        return once * (2 if kind == "all-reduce" else 1)

    def compiled(self, kind: ReshardKind, pieces: Pieces, local_bytes: float) -> tuple[ReshardKind, float]:
        """The collective that XLA makes of one, and what a device has before that.

        On a torus a scattered sum over three dimensions, or over two lines, is an all-reduce whose result is sliced. A
        gather over three is an all-reduce of parts among zeros. Two neighbours are no dimension.
        """
        rings = [p for p in self._merged(pieces) if self.dims[p.dim].kind == "ring" and p.size > 2]
        lines = [p for p in rings if not self._closed(p)]
        if kind == "reduce-scatter" and (len(rings) > 2 or len(lines) > 1):
            return "all-reduce", local_bytes
        if kind == "all-gather" and len(rings) > 2:
            return "all-reduce", local_bytes * math.prod(p.size for p in pieces)
        return kind, local_bytes

    def _closed(self, piece: Piece) -> bool:
        dim = self.dims[piece.dim]
        return dim.wraps and piece.size * piece.stride == dim.size

    def _merged(self, pieces: Pieces) -> list[Piece]:
        """Pieces of one dimension as one, so that two halves are a whole ring."""
        of_dim: dict[int, list[Piece]] = defaultdict(list)
        for p in pieces:
            if p.size > 1:
                of_dim[p.dim].append(p)
        return [Piece(d, math.prod(p.size for p in ps), min(p.stride for p in ps)) for d, ps in of_dim.items()]

    def _tiers(self, pieces: Sequence[Piece]) -> list[tuple[float, list[Piece]]]:
        """Pieces by the speed of their network, the fastest first; dimensions of one torus go together."""
        tiers: dict[tuple[float, str], list[Piece]] = defaultdict(list)
        for p in pieces:
            dim = self.dims[p.dim]
            tiers[dim.bandwidth, dim.kind if dim.kind == "ring" else dim.name].append(p)
        return [(speed, group) for (speed, _), group in sorted(tiers.items(), key=lambda item: -item[0][0])]

    def _piece_bandwidth(self, piece: Piece) -> float:
        dim = self.dims[piece.dim]
        if dim.kind == "switch":
            return dim.bandwidth
        return dim.bandwidth * (2 if self._closed(piece) else 1) / piece.stride

    def _hop(self, piece: Piece) -> float:
        dim = self.dims[piece.dim]
        if dim.kind == "switch":
            return dim.latency_us + dim.each_us * (piece.size - 1)
        hops = piece.size // 2 if self._closed(piece) else piece.size - 1
        return dim.latency_us * hops * piece.stride

    def _exchange_us(self, group: Sequence[Piece], local_bytes: float) -> float:
        """All-to-all in a torus: a quarter of all bytes cross the middle of the longest dimension each way.

        n devices with B bytes each; n / longest lines (twice as many links where they are rings) carry n B / 4.
        """
        n = math.prod(p.size for p in group)
        longest = max(group, key=lambda p: p.size / self._piece_bandwidth(p))
        bandwidth = self._piece_bandwidth(longest)
        if self.dims[longest.dim].kind == "switch":
            return self._hop(longest) + (n - 1) / n * local_bytes / bandwidth * 1e6
        return self._hop(longest) + max(longest.size / 4, (n - 1) / n) * local_bytes / bandwidth * 1e6


@shown
@dataclass(frozen=True)
class DeviceAssignment:
    """Where each mesh axis lies: mesh axis -> pieces, major to minor."""

    topology: Topology
    pieces: Mapping[str, Pieces]
    _times: dict = field(default_factory=dict, compare=False, repr=False)
    _compiled: dict = field(default_factory=dict, compare=False, repr=False)

    def time_us(self, kind: ReshardKind, axes: Iterable[str], local_bytes: float) -> float:
        """How long a collective over these mesh axes takes; see `Topology.time_us`."""
        axes = tuple(axes)
        found = self._times.get((kind, axes))
        if found is None:  # the time is latency + bytes / bandwidth: two points tell both
            over = self.over(axes)
            latency = self.topology.time_us(kind, over, 0.0)
            found = self._times[kind, axes] = latency, (self.topology.time_us(kind, over, 1e9) - latency) / 1e9
        return found[0] + found[1] * local_bytes

    def compiled(self, kind: ReshardKind, axes: tuple[str, ...]) -> tuple[ReshardKind, float, int]:
        """What XLA makes of a collective over these mesh axes (`Topology.compiled`).

        Returns:
            its kind; how many times as much a device has before it; how many devices it runs over.
        """
        found = self._compiled.get((kind, axes))
        if found is None:
            over = self.over(axes)
            made, more = self.topology.compiled(kind, over, 1.0)
            found = self._compiled[kind, axes] = made, more, math.prod(p.size for p in over)
        return found

    def over(self, axes: Iterable[str]) -> Pieces:
        """Where a group over these mesh axes lies."""
        return tuple(p for a in axes for p in self.pieces[a])

    @cached_property
    def order(self) -> tuple[int, ...]:
        """For each place of the mesh (row-major) the number of its device in the topology's row-major order."""
        stride_of_dim = [math.prod(d.size for d in self.topology.dims[i + 1 :]) for i in range(len(self.topology.dims))]
        order = [0]
        for pieces in self.pieces.values():
            for p in pieces:
                step = p.stride * stride_of_dim[p.dim]
                order = [base + i * step for base in order for i in range(p.size)]
        return tuple(order)

    def text(self) -> dict[str, str]:
        """Mesh axis -> where it lies, such as `x:4 y:2/2` (2 of dimension y, every second device)."""
        names = [d.name for d in self.topology.dims]
        return {
            a: " ".join(f"{names[p.dim]}:{p.size}" + (f"/{p.stride}" if p.stride > 1 else "") for p in ps)
            for a, ps in self.pieces.items()
        }


@lru_cache(maxsize=4096)
def assign(topology: Topology, mesh: tuple[tuple[str, int], ...]) -> DeviceAssignment:
    """The plainest laying: the last mesh axis on the nearest devices."""
    return next(assignments(topology, dict(mesh), [a for a, _ in reversed(mesh)]))


def assignments(topology: Topology, mesh: Mapping[str, int], first: Sequence[str]) -> Iterator[DeviceAssignment]:
    """Layings of a mesh that give the axes of `first` their places in that order, the best place first.

    An axis takes whole dimensions before parts of them, near ones before far ones; every way to do so is given, but
    of dimensions that are alike only the first. Where the sizes do not fit the dimensions (3 on 4 x 4), the axes are
    laid in row-major order over all devices.
    """
    seen: set[tuple[tuple[str, Pieces], ...]] = set()
    for found in _choices(topology, [(a, mesh[a]) for a in first], {}, {}):
        key = tuple((a, found[a]) for a in mesh)
        if key not in seen:
            seen.add(key)
            yield DeviceAssignment(topology, dict(key))
    if not seen:
        each_us = max(d.each_us for d in topology.dims)
        flat = Dim("device", topology.devices, "switch", *_slowest(topology), each_us=each_us)
        pieces: dict[str, Pieces] = {}
        stride = 1
        for a in reversed(list(mesh)):
            pieces[a] = (Piece(0, mesh[a], stride),)
            stride *= mesh[a]
        yield DeviceAssignment(Topology((flat,)), {a: pieces[a] for a in mesh})


def _slowest(topology: Topology) -> tuple[float, float]:
    slow = min((d for d in topology.dims if d.size > 1), key=lambda d: d.bandwidth, default=topology.dims[0])
    return slow.bandwidth, slow.latency_us


def _choices(
    topology: Topology, axes: Sequence[tuple[str, int]], taken: Mapping[int, int], found: Mapping[str, Pieces]
) -> Iterator[dict[str, Pieces]]:
    """Every way to lay the axes, in order, where `taken[dim]` devices of a dimension are behind earlier ones."""
    if not axes:
        yield dict(found)
        return
    (axis, size), *rest = axes
    for pieces in _pieces(topology, size, taken):
        now = dict(taken)
        for p in pieces:
            now[p.dim] = now.get(p.dim, 1) * p.size
        yield from _choices(topology, rest, now, {**found, axis: pieces})


def _pieces(topology: Topology, size: int, taken: Mapping[int, int]) -> Iterator[Pieces]:
    """Ways to take `size` devices, each a dimension's free part or a factor of it; major to minor."""
    if size == 1:
        yield ()
        return
    options: list[Pieces] = []
    alike: set[tuple[Dim, int]] = set()
    for number in range(len(topology.dims) - 1, -1, -1):
        dim, behind = topology.dims[number], taken.get(number, 1)
        free = dim.size // behind
        shared = math.gcd(size, free)
        key = (replace(dim, name=""), behind)
        if shared == 1 or key in alike:
            continue
        alike.add(key)
        mine = Piece(number, shared, behind)
        for others in _pieces(topology, size // shared, {**taken, number: behind * shared}):
            options.append((*others, mine))
    yield from options
