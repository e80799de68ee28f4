"""The variants of a train step that differ in what a layer does with its named values, and their prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard._shown import shown
from autoshard.models.remat.policies import remat_policies
from autoshard.sharding.plan.memory_doubt import ranked_us
from autoshard.train.program import constants

MakeStep = Callable[[str, int], tuple[Any, ...]]
"""A function from a remat policy and a number of microbatches to a step with stacked layers and its argument shapes."""


@shown
@dataclass(frozen=True)
class RematSpace:
    """The variants of a train step.

    Attributes:
        step: makes the step of a variant.
        names: the named values of a layer.
        layers: the number of units that a policy applies to.
        microbatches: the numbers of microbatches to try.
        offloads: whether values may wait on the host.
        host: the values that wait there in every variant; if there are any, no others may.
        optional: those of `host` that are left out if they move nothing.
        options: `target`, `mesh`, `plan`, `memory_limit_bytes`, `fixed` and others of `autoshard.plan`, as far as
            given. `offload` has the words of what the planner moves.
    """

    step: MakeStep
    names: Sequence[str]
    layers: int
    microbatches: Sequence[int]
    offloads: bool = True
    host: Sequence[str] = ()
    optional: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@shown
@dataclass(frozen=True)
class Priced:
    """A variant with its price, under the strategy that suits it best.

    Attributes:
        remat: the policy of the layers.
        microbatches: the number of microbatches.
        time_us: microseconds of a step.
        peak_bytes: peak memory of a device.
        host_us: microseconds in which the link to the host is busy.
        host_bytes: bytes that wait on the host at a time; more than 0 if any values do.
        usable_bytes: the memory that the program can use without a slowdown (`memory_doubt`); infinite if there is no
            limit.
        strategy: the strategy; empty if it is that which suits the variant best.
    """

    remat: str
    microbatches: int
    time_us: float
    peak_bytes: float
    host_us: float = 0.0
    host_bytes: float = 0.0
    usable_bytes: float = math.inf
    strategy: str = ""

    @property
    def offloads(self) -> bool:
        """Whether values wait on the host."""
        return self.host_bytes > 0

    @property
    def is_mix(self) -> bool:
        """Whether layers have different policies."""
        return len(remat_policies(self.remat)) > 1

    @property
    def score_us(self) -> float:
        """The time by which variants are ranked.

        A part of the time on the link counts as exposed. Plans that may need too much memory are penalized
        (`memory_doubt`).
        """
        return ranked_us(self.time_us + constants.HOST_DOUBT * self.host_us, self.peak_bytes, self.usable_bytes)

    @property
    def keywords(self) -> dict[str, Any]:
        """The variant, as keywords of the step."""
        return {"remat": self.remat, "microbatches": self.microbatches}
