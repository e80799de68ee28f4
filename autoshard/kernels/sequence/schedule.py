"""Which keys reach which queries in a ring, and how many hops they travel.

full attention       each device keeps its queries, and the keys of all devices reach it: n - 1 hops
causal               the same, after an exchange of chunks that balances the work (`exchange`)
causal with window   only keys within the window reach it: ceil((window - 1) / local length) hops
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.kernels.visibility import Visibility


@shown
@dataclass(frozen=True)
class Schedule:
    """How keys travel.

    Attributes:
        devices: the devices of the ring.
        length: positions that each device holds.
        hops: how far the keys of a device travel.
        balanced: whether chunks are exchanged beforehand.
    """

    devices: int
    length: int
    hops: int
    balanced: bool = False


def schedule(visibility: Visibility, devices: int, length: int, lanes: int = 1) -> Schedule:
    """Return the schedule of a ring.

    Args:
        visibility: which keys a query sees.
        devices: the devices of the ring.
        length: positions that each device holds.
        lanes: a kernel takes only multiples of this number of positions. If half of a shard is not a multiple, the work
            is not balanced.

    >>> schedule(Visibility(causal=True, window=100), devices=8, length=64).hops
    2
    """
    hops = devices - 1
    if visibility.causal and visibility.window is not None:
        hops = min(hops, -(-(visibility.window - 1) // length))
    balanced = visibility.causal and visibility.window is None and length % (2 * lanes) == 0 and devices > 1
    return Schedule(devices, length, hops, balanced)
