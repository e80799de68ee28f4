"""A layout with its price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard._shown import shown
from autoshard.sharding.cost.collectives import StepCost, best_assignment
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.machines.topology import DeviceAssignment


@shown
@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs."""

    name: str
    layout: Layout
    cost: StepCost
    peak_bytes: float
    memory: Mapping[str, float]
    laying: DeviceAssignment

    def fits(self, limit: float) -> bool:
        """Whether its worst moment fits in `limit` bytes."""
        return self.peak_bytes <= limit


def candidate_time(candidate: Candidate) -> float:
    """The estimated step time in microseconds, rounded so that equal plans tie."""
    return round(candidate.cost.step_time_us, 3)


def best_assigned(candidate: Candidate, cost: CostModel) -> Candidate:
    """A candidate whose mesh axes lie where their traffic takes the least time."""
    laying, found = best_assignment(cost.target, candidate.layout.mesh, candidate.cost)
    return replace(candidate, laying=laying, cost=found)


def price(name: str, layout: Layout, cost: CostModel, memory: MemoryModel) -> Candidate:
    """A layout with its cost."""
    step = cost(layout)
    peak, kinds = memory(layout, step.waiting)
    return Candidate(name, layout, step, peak, kinds, cost.target.assign(layout.mesh))


@dataclass(eq=False)
class SearchCounts:
    """What a search notes while it goes on: see `Searched`; `changed` are the candidates that `improve` had priced."""

    proposed: int = 0
    alike: int = 0
    idle: int = 0
    changed: list[Candidate] = field(default_factory=list)
