"""The record of a search: what was priced for each variant of the program, and what decided.

Exposed time is the time of a collective that compute does not hide. Collectives that can be hidden (of parameters and
gradients, of the kinds that the chip's compiler makes asynchronous) are all hidden by the same fraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class PricedPlan:
    """A plan that was priced.

    Attributes:
        strategy: its strategy.
        step_time_us: time of a step, in microseconds.
        peak_bytes: peak memory of one device, in bytes.
        compute_us: compute time, in microseconds.
        most_exposed_kind: the kind of collective with the most exposed time; empty if none is exposed.
        most_exposed_us: exposed time of that kind, in microseconds.
        changed: whether local search made it from a known plan; false for the plans that were proposed.
    """

    strategy: str
    step_time_us: float
    peak_bytes: float
    compute_us: float = 0.0
    most_exposed_kind: str = ""
    most_exposed_us: float = 0.0
    changed: bool = False


@shown
@dataclass(frozen=True)
class SearchRecord:
    """The search for one variant of the program.

    Attributes:
        variant: its static keywords; empty where there are no variants.
        proposed: how many plans the search began with.
        alike: how many of them have the same layout as an earlier one.
        idle: how many of them leave devices without work of their own and are not fast enough to justify it.
        slow: how many of them were not priced, because others of their group are too slow (`search.time_floors`).
        tried: the plans that were priced, the fastest first, those of local search among them.
    """

    variant: Mapping[str, Any] = field(default_factory=dict)
    proposed: int = 0
    alike: int = 0
    idle: int = 0
    slow: int = 0
    tried: tuple[PricedPlan, ...] = ()
