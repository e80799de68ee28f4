"""A layout with its price."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard._shown import shown
from autoshard.sharding.cost.collectives import StepCost, best_assignment
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.machines.device_assignments import DeviceAssignment
from autoshard.sharding.plan.memory_doubt import ranked_us, usable_bytes
from autoshard.sharding.search.constants import TIME_DECIMALS


@shown
@dataclass(frozen=True)
class Candidate:
    """A layout with its price.

    Attributes:
        name: its strategy, or the text of its table.
        layout: the layout.
        cost: the time of a step.
        peak_bytes: peak memory of a device.
        memory: kind of value -> bytes on a device.
        assignment: the device assignment.
        host_bytes: bytes in host memory that belong to one device.
        host_limit: the bytes of host memory that one device may use.
        usable_bytes: the memory that its program can use without a slowdown (`memory_doubt`); infinite if there is no
            limit.
    """

    name: str
    layout: Layout
    cost: StepCost
    peak_bytes: float
    memory: Mapping[str, float]
    assignment: DeviceAssignment
    host_bytes: float = 0.0
    host_limit: float = math.inf
    usable_bytes: float = math.inf

    def fits(self, limit: float) -> bool:
        """Whether its peak memory is at most `limit` bytes, and its share of the host's memory suffices."""
        return self.peak_bytes <= limit and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether its share of the host's memory suffices."""
        return self.host_bytes <= self.host_limit


def estimated_us(candidate: Candidate) -> float:
    """The estimated step time in microseconds, rounded so that equal plans tie."""
    return round(candidate.cost.step_time_us, TIME_DECIMALS)


def candidate_ranked_us(candidate: Candidate) -> float:
    """The time in microseconds by which candidates are ranked (`memory_doubt`), rounded so that equal plans tie."""
    return round(ranked_us(candidate.cost.step_time_us, candidate.peak_bytes, candidate.usable_bytes), TIME_DECIMALS)


def best_assigned(candidate: Candidate, cost: CostModel) -> Candidate:
    """The candidate with the device assignment under which its communication takes the least time."""
    assignment, assigned_cost = best_assignment(cost.target, candidate.layout.mesh, candidate.cost)
    return replace(candidate, assignment=assignment, cost=assigned_cost)


def price(name: str, layout: Layout, cost: CostModel, memory: MemoryModel, limit: float = math.inf) -> Candidate:
    """Price a layout under the default device assignment."""
    step = cost(layout)
    peak, kinds = memory(layout, step.live_buffers)
    chip, assignment = cost.target.chip, cost.target.assign(layout.mesh)
    return Candidate(
        name, layout, step, peak, kinds, assignment, memory.host_bytes(layout), chip.host_limit_bytes,
        usable_bytes(limit, chip),
    )  # fmt: skip


@shown
@dataclass(eq=False)
class SearchCounts:
    """Counts of one search.

    Attributes:
        proposed: number of known plans.
        duplicates: number of those that were left out because an earlier one has the same shardings.
        idle: number of those that were left out because a mesh axis shards nothing in them.
        slow: number of those that were left out because they are slower than others in any case.
        changed: the candidates that the local search priced.
    """

    proposed: int = 0
    duplicates: int = 0
    idle: int = 0
    slow: int = 0
    changed: list[Candidate] = field(default_factory=list)
