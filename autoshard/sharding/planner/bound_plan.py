"""A plan together with its program: the planning problem, the layout of every value, the device assignment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoshard._shown import shown
from autoshard.errors import PlanError
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.machines.device_assignments import DeviceAssignment
from autoshard.sharding.plan.gather_words import PREFETCH
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.search.late_sums import Groups


@shown
@dataclass(eq=False)
class BoundPlan:
    """A plan with its program.

    Attributes:
        plan: the plan.
        problem: the traced function and the machine; it also prices alternatives to the plan.
        layout: the sharding of every value of the program.
        assignment: the device assignment.
        groups: the groups of rows that are worth a search of the step, if it was searched without any
            (`search.late_sums`); None if there are none.
    """

    plan: ShardingPlan
    problem: PlanningProblem
    layout: Layout
    assignment: DeviceAssignment
    groups: Groups | None = None

    def __deepcopy__(self, memo: Any) -> BoundPlan:  # a trace cannot be copied: it is shared
        return self

    @property
    def traced(self) -> Traced:
        """The function."""
        return self.problem.traced

    @cached_property
    def executable(self) -> Executable:
        """The annotated program."""
        machine = self.problem.machine
        early = self.problem.cost(self.layout).early if self.plan.gather == PREFETCH else frozenset()
        overlap = self.problem.overlap
        if overlap is not None:
            early = frozenset(each for each in early if not overlap.gathers_alone(each[1]))
        target = machine.target
        return Executable(
            self.plan, self.traced, self.layout, target.link_prices, target.chip, machine.mesh, early, overlap
        )

    def where(self, **changes: Any) -> BoundPlan:
        """Return a copy with changed attributes of its plan."""
        changed = replace(self, plan=self.plan.where(**changes))
        changed.executable.wrap = self.executable.wrap
        return changed


def bound_or_error(bound: BoundPlan | None) -> BoundPlan:
    """Return `bound`, after checking that it is not None.

    Raises:
        PlanError: the plan has no function.
    """
    if bound is None:
        raise PlanError("this plan has no function (it was read from JSON): give it one with plan.bind(fn, *args)")
    return bound
