"""The cost of one run of an operator."""

from __future__ import annotations

from typing import NamedTuple

from autoshard._shown import shown
from autoshard.sharding.cost.opaque_memory import OpaqueMemory
from autoshard.sharding.layout.operator_strategy import Move


@shown
class Price(NamedTuple):
    """The cost of one run of an operator.

    Attributes:
        time_us: microseconds of its kernel.
        moves: the collectives that it needs.
        held_bytes: for a declared operator, the peak bytes of its own values; for a grouped product, its masked copies.
        beside_us: on a ring, the microseconds of its kernel during which keys are sent.
        inside: for a declared operator whose function is known, what it holds in the course of its run.
    """

    time_us: float
    moves: tuple[Move, ...]
    held_bytes: float = 0.0
    beside_us: float = 0.0
    inside: OpaqueMemory | None = None
