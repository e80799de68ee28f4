"""How long a compiled collective takes on the links of a target, and which of them it takes.

The devices of its groups are looked up in the target's topology (partition -> place in the mesh -> device), so that it
does not matter whether the groups are mesh axes. A group that is a box of evenly spaced devices is what
`Topology.time_us` prices; one that is none counts as the smallest box around it. Of different groups the slowest
counts.

A permute's messages go one dimension after the other, the shorter way around a ring:

    time = the longest way's latency + payload x the most messages over one link / its bandwidth
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.replica_groups import Groups
from autoshard.sharding.machines.topology import Piece, Pieces, Topology
from autoshard.spmdrules.core.placement import ReshardKind

# What `Topology` prices a kind as; what is not here as a gathering.
KINDS: Mapping[str, ReshardKind] = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
}
Link = tuple[int, tuple[int, ...], int]  # dimension, the device that sends, direction


@dataclass(frozen=True)
class Wires:
    """The links under a program.

    Attributes:
        topology: of the target.
        order: for each partition of the program the number of its device, row-major in the topology.
    """

    topology: Topology
    order: tuple[int, ...]

    @cached_property
    def places(self) -> np.ndarray:
        """Where each partition's device stands: a row of coordinates each."""
        sizes = tuple(d.size for d in self.topology.dims)
        return np.stack(np.unravel_index(np.array(self.order), sizes), -1)

    @cached_property
    def across(self) -> Groups:
        """The partitions that stand at one place in all slices, a group each; none where there is one slice."""
        names = [d.name for d in self.topology.dims]
        if "slice" not in names:
            return ()
        groups: dict[tuple[int, ...], list[int]] = {}
        for partition, at in enumerate(np.delete(self.places, names.index("slice"), axis=1).tolist()):
            groups.setdefault(tuple(at), []).append(partition)
        return tuple(map(tuple, groups.values()))

    def time_us(self, collective: Collective) -> float:
        """How long one run takes with its links to itself."""
        if collective.size == 1:
            return 0.0
        if collective.pairs:
            return self._permute_us(collective.groups, collective.payload_bytes)
        kind = KINDS.get(collective.kind, "all-gather")
        boxes = {self.pieces(group) for group in collective.groups}
        return max(self.topology.time_us(kind, box, collective.local_bytes) for box in boxes)

    def links(self, collective: Collective) -> frozenset[tuple[int, int]]:
        """What it takes: dimensions of the topology, each in one direction (of a permute) or in both."""
        if collective.pairs:
            return frozenset((dim, step) for way in self._ways(collective.groups) for dim, _, step in way)
        spread = {
            int(dim) for group in collective.groups for dim in np.flatnonzero(np.ptp(self.places[list(group)], 0))
        }
        return frozenset((dim, step) for dim in spread for step in (1, -1))

    def pieces(self, group: Sequence[int]) -> Pieces:
        """The box of devices that a group fills: of each dimension how many, and how far apart."""
        found = []
        for dim, column in enumerate(self.places[list(group)].T):
            at = np.unique(column)
            if len(at) > 1:
                gaps = np.diff(at)
                even = bool((gaps == gaps[0]).all())
                stride = int(gaps[0]) if even else 1
                found.append(Piece(dim, len(at) if even else int(at[-1] - at[0]) + 1, stride))
        return tuple(found)

    def _permute_us(self, pairs: Groups, payload: float) -> float:
        ways, dims = self._ways(pairs), self.topology.dims
        load = Counter(link for way in ways for link in way)
        busiest = max((count / dims[dim].bandwidth for (dim, _, _), count in load.items()), default=0.0)
        latency = max((sum(dims[dim].latency_us for dim, _, _ in way) for way in ways), default=0.0)
        return latency + payload * busiest * 1e6

    def _ways(self, pairs: Groups) -> list[list[Link]]:
        return [list(self._way(*(self.places[p] for p in pair))) for pair in pairs]

    def _way(self, start: np.ndarray, end: np.ndarray) -> Iterator[Link]:
        """The links from one device to another."""
        at = start.tolist()
        for number, dim in enumerate(self.topology.dims):
            distance = int(end[number]) - at[number]
            if dim.kind == "switch":
                if distance:
                    yield number, tuple(at), 1
                at[number] = int(end[number])
                continue
            if dim.wraps and abs(distance) > dim.size / 2:
                distance -= int(math.copysign(dim.size, distance))
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield number, tuple(at), step
                at[number] = (at[number] + step) % dim.size
