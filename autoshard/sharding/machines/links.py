"""The time and traffic of one kind of collective over a group of devices, as functions of its bytes."""

from __future__ import annotations

from typing import NamedTuple

from autoshard._shown import shown
from autoshard.spmdrules.core.placement import ReshardKind


@shown
class Links(NamedTuple):
    """A collective over a group of devices, for any number of bytes.

    Attributes:
        kind: the collective that XLA emits (`Topology.compiled`).
        factor: by which each device's operand grows for it.
        devices: the number of devices of the group.
        sent: bytes that leave each device for a byte of its operand.
        latency_us: microseconds without any bytes.
        us_per_byte: microseconds for each byte of each device's operand.
        box_dims: the number of dimensions that the group spans; 0 if it leaves out devices in between.
    """

    kind: ReshardKind
    factor: float
    devices: int
    sent: float
    latency_us: float
    us_per_byte: float
    box_dims: int

    def time_us(self, local_bytes: float) -> float:
        """Microseconds of one run.

        Args:
            local_bytes: bytes of each device's operand, after it has grown.
        """
        return self.latency_us + self.us_per_byte * local_bytes
