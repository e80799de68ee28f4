"""The time of a compiled collective on a target, and the links that it uses.

The devices of each group are looked up in the target's topology (partition -> position in the mesh -> device), so the
groups need not be mesh axes. `Topology.time_us` prices groups that are boxes of evenly spaced devices. Any other group
counts as the smallest box around it. If groups differ, the slowest one counts.

The messages of a permute are routed along one dimension after the other, the shorter way around a ring. A switch, such
as the network between slices, delivers to the device itself:

    time = latency of the longest route + payload x largest number of messages on one link / its bandwidth
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.replica_groups import Groups
from autoshard.sharding.hlo.slice_groups import Slices
from autoshard.sharding.machines.topology import Piece, Pieces, Topology
from autoshard.spmdrules.core.placement import ReshardKind

# Kind in HLO -> kind that `Topology` prices it as. Other kinds are priced as all-gathers.
KINDS: Mapping[str, ReshardKind] = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
}
Link = tuple[int, tuple[int, ...], int]  # dimension, coordinates of the sending device, direction (1 or -1)


@shown
@dataclass(frozen=True)
class ProgramLinks:
    """The links between the partitions of a program.

    Attributes:
        topology: the topology of the target.
        order: for each partition of the program the row-major index of its device in the topology.
    """

    topology: Topology
    order: tuple[int, ...]

    @cached_property
    def coordinates(self) -> np.ndarray:
        """The coordinates of each partition's device, `[partitions, dimensions]`."""
        sizes = tuple(d.size for d in self.topology.dims)
        return np.stack(np.unravel_index(np.array(self.order), sizes), -1)

    @cached_property
    def slices(self) -> Slices | None:
        """The slices of the target; None if it has one."""
        return Slices(self.order, self.topology.dims[0].size) if self.topology.has_slices else None

    def time_us(self, collective: Collective) -> float:
        """Microseconds of one run with no other traffic on its links."""
        if collective.size == 1:
            return 0.0
        if collective.is_permute:
            return self._permute_us(collective.groups, collective.payload_bytes)
        kind = KINDS.get(collective.kind, "all-gather")
        if self.slices and any(len(set(self.coordinates[list(group), 0].tolist())) > 1 for group in collective.groups):
            return self.topology.flat_us(kind, collective.size, collective.local_bytes)  # a send between slices
        boxes = {self.pieces(group) for group in collective.groups}
        return max(self.topology.time_us(kind, box, collective.local_bytes) for box in boxes)

    def links(self, collective: Collective) -> frozenset[tuple[int, int]]:
        """The links that a collective uses, as pairs (dimension, direction); only permutes use a single direction."""
        if collective.is_permute:
            return frozenset((dim, step) for route in self._routes(collective.groups) for dim, _, step in route)
        spanned = {
            int(dim) for group in collective.groups for dim in np.flatnonzero(np.ptp(self.coordinates[list(group)], 0))
        }
        return frozenset((dim, step) for dim in spanned for step in (1, -1))

    def pieces(self, group: Sequence[int]) -> Pieces:
        """The smallest box of devices around a group."""
        found = []
        for dim, column in enumerate(self.coordinates[list(group)].T):
            coords = np.unique(column)
            if len(coords) > 1:
                gaps = np.diff(coords)
                even = bool((gaps == gaps[0]).all())
                stride = int(gaps[0]) if even else 1
                found.append(Piece(dim, len(coords) if even else int(coords[-1] - coords[0]) + 1, stride))
        return tuple(found)

    def _permute_us(self, pairs: Groups, payload: float) -> float:
        routes, dims = self._routes(pairs), self.topology.dims
        load = Counter(link for route in routes for link in route)
        busiest = max((count / dims[dim].bandwidth for (dim, _, _), count in load.items()), default=0.0)
        latency = max((sum(dims[dim].latency_us for dim, _, _ in route) for route in routes), default=0.0)
        return latency + payload * busiest * 1e6

    def _routes(self, pairs: Groups) -> list[list[Link]]:
        return [list(self._route(*(self.coordinates[p] for p in pair))) for pair in pairs]

    def _route(self, start: np.ndarray, end: np.ndarray) -> Iterator[Link]:
        """Yields the links from one device to another."""
        at = start.tolist()
        for number, dim in enumerate(self.topology.dims):
            distance = int(end[number]) - at[number]
            if dim.kind == "switch":
                if distance:  # the network between slices or hosts delivers to the device itself
                    yield number, tuple(at), 1
                    return
                continue
            if dim.wraps and abs(distance) > dim.size / 2:
                distance -= int(math.copysign(dim.size, distance))
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield number, tuple(at), step
                at[number] = (at[number] + step) % dim.size
