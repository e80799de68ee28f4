"""What a byte on the links costs: in FLOPs, and by the kind of collective that moves it.

    price of a collective = bytes that each device sends x weight of its kind
    weight of a kind      = time of the kind / time of an all-gather, for equally many bytes sent by each device

All kinds but the all-to-all keep every link of a torus busy and have weight 1. The bytes of an all-to-all have to cross
the middle of the torus (`Topology.time_us`), so its weight is about 2.3 for 8 devices of a v5e:2x4, and 8 for all of a
v5e:16x16. On a switch it is 1. The weight depends on the number of devices only, not on their places: the choice of an
operator's strategy must not change when mesh axes are assigned to other devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from autoshard._shown import shown
from autoshard.sharding.machines.constants import WEIGHED_BYTES
from autoshard.sharding.machines.device_assignments import assign
from autoshard.sharding.machines.topology import Topology
from autoshard.spmdrules.core.placement import ReshardKind


@shown
@dataclass(frozen=True, eq=False)
class LinkPrices:
    """The prices of bytes on the links of a machine. Prices are compared by identity; see `link_prices`.

    Attributes:
        flops_per_byte: FLOPs that a device does at peak in the time that it takes to send one byte to a neighbour.
        topology: how the devices are connected; None if that is not known, and all kinds of collectives cost the same.
    """

    flops_per_byte: float
    topology: Topology | None = None
    _weights: dict[int, float] = field(default_factory=dict, repr=False)

    def weight(self, kind: str, devices: int) -> float:
        """Return the weight of a kind of collective over groups of so many devices."""
        if kind != "all-to-all" or self.topology is None:
            return 1.0
        if devices not in self._weights:
            self._weights[devices] = _all_to_all_weight(self.topology, devices)
        return self._weights[devices]


@lru_cache(maxsize=64)
def link_prices(flops_per_byte: float, topology: Topology) -> LinkPrices:
    """Return the prices of a machine, the same object for equal machines."""
    return LinkPrices(flops_per_byte, topology)


def _all_to_all_weight(topology: Topology, devices: int) -> float:
    """The weight of an all-to-all over the nearest devices."""
    if devices < 2 or topology.devices % devices:
        return 1.0
    mesh = (("outer", topology.devices // devices), ("group", devices))
    assigned = assign(topology, mesh)
    pieces, topology = assigned.pieces["group"], assigned.topology

    def us(kind: ReshardKind) -> float:  # without latency
        return topology.time_us(kind, pieces, WEIGHED_BYTES) - topology.time_us(kind, pieces, 0.0)

    return max(us("all-to-all") / us("reduce-scatter"), 1.0)
