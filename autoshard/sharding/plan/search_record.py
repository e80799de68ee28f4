"""How a plan was found: what was priced for each variant of the program, and what decided.

A plan waits for a collective as long as compute does not hide it: of all that could be hidden (parameters and
gradients, of the kinds that the chip's compiler makes asynchronous) every collective is hidden by the same part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoshard._shown import shown

if TYPE_CHECKING:
    pass


@shown
@dataclass(frozen=True)
class PricedPlan:
    """A plan that was priced.

    Attributes:
        words: what it is called.
        step_time_us: microseconds of a step.
        peak_bytes: bytes on one device at the worst moment.
        compute_us: microseconds of compute.
        waits_for: the kind of collective that it waits for longest, empty if for none.
        waits_us: microseconds that it waits for that kind.
        changed: whether it is a known plan changed by words (`improve`), not one of those that were proposed.
    """

    words: str
    step_time_us: float
    peak_bytes: float
    compute_us: float = 0.0
    waits_for: str = ""
    waits_us: float = 0.0
    changed: bool = False


@shown
@dataclass(frozen=True)
class SearchRecord:
    """The plans of one variant of the program.

    Attributes:
        variant: its static keywords, empty where there are no variants.
        proposed: the plans that the search began with.
        alike: those of them that lay everything out as an earlier one does.
        idle: those that leave devices without work of their own and are not enough faster for it.
        tried: those that were priced, the fastest first, and the best of them changed word by word.
    """

    variant: Mapping[str, Any] = field(default_factory=dict)
    proposed: int = 0
    alike: int = 0
    idle: int = 0
    tried: tuple[PricedPlan, ...] = ()
