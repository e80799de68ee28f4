"""How XLA:TPU implements a collective whose devices are in several slices.

    all-reduce       a reduce-scatter within the slices, an all-reduce between them, and an all-gather within them
    reduce-scatter   the same, and a slice of the result
    all-gather       one between the slices and one within them, if the slices are the major or the minor part of the
                     group. If they are in the middle, all bytes cross the network between slices
    all-to-all       all bytes cross the network, also those for devices of the same slice

Found in programs that libtpu 0.0.42 compiled for v5e:4x4*4. The slices are dimension 0 of the topology.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.spmdrules.core.placement import ReshardKind

SLICE = "slice"  # the name of the dimension of a target's slices


def spans_both(spanned: Sequence[int]) -> bool:
    """Say whether a group has several slices, and several devices of each.

    Args:
        spanned: the dimensions of the topology that the group spans, major to minor.
    """
    return 0 in spanned and any(spanned)


def is_flat(kind: ReshardKind, spanned: Sequence[int]) -> bool:
    """Say whether a collective sends all its bytes over the network.

    Args:
        kind: the kind.
        spanned: the dimensions of the topology that a group spans, major to minor.

    Example:
        >>> [is_flat("all-gather", dims) for dims in ((0, 1, 2), (1, 2, 0), (1, 0, 2))]
        [False, False, True]
    """
    if not spans_both(spanned) or kind not in ("all-gather", "all-to-all"):
        return False
    within = [dim != 0 for dim in spanned]
    return kind == "all-to-all" or sorted(within) not in (within, within[::-1])


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
