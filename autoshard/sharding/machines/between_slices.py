"""What XLA:TPU does with a collective whose devices are in several slices.

It runs an all-reduce within the slices and between them, and so an all-gather if the slices are the major part of the
group. A reduce-scatter is then one within the slices, and an all-reduce between them. Any other group, and any
all-to-all, sends all its bytes over the network between the slices, those for devices of the same slice included.

Found in programs that libtpu 0.0.42 compiled for v5e:4x4*4. The slices are dimension 0 of the topology.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.spmdrules.core.placement import ReshardKind

SLICE = "slice"  # the name of the dimension of a target's slices


def is_flat(kind: ReshardKind, spanned: Sequence[int]) -> bool:
    """Whether a collective sends all its bytes over the network.

    Args:
        kind: the kind.
        spanned: the dimensions of the topology that a group spans, major to minor.
    """
    if 0 not in spanned or len(spanned) == 1:
        return False
    return kind == "all-to-all" or (kind != "all-reduce" and spanned[0] != 0)


def flat_us(kind: ReshardKind, devices: int, local_bytes: float, bandwidth: float, latency_us: float) -> float:
    """Microseconds of a collective that sends all its bytes over the network.

    Args:
        kind: `all-gather`, `reduce-scatter`, `all-reduce` or `all-to-all`.
        devices: the number of devices of a group.
        local_bytes: bytes of each device's operand.
        bandwidth: bytes per second that one device sends to other slices.
        latency_us: microseconds of one message between slices.

    Example:
        >>> flat_us("all-gather", 4, 1e6, 1e9, 20.0)
        3020.0
    """
    passes = 2 if kind == "all-reduce" else 1
    sent = (devices - 1) * local_bytes / (1 if kind == "all-gather" else devices)
    return passes * (latency_us + sent / bandwidth * 1e6)
