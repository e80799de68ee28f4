"""A note on work that several devices repeat."""

from __future__ import annotations

import math

from autoshard._units import time_text
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.planner.constants import NOTED_REPEATED_SHARE
from autoshard.sharding.planner.problem import PlanningProblem


def repeated_work_notes(problem: PlanningProblem, layout: Layout, step_us: float) -> list[str]:
    """Return a note if a large part of the step is work that devices repeat (`CostModel.repeated_us`).

    Args:
        problem: the planning problem.
        layout: the layout of the plan.
        step_us: the estimated time of the plan's step, in microseconds.
    """
    repeated = problem.cost.repeated_us(layout)
    total = sum(repeated.values())
    if total == 0 or total < NOTED_REPEATED_SHARE * step_us:
        return []
    line = max(repeated, key=lambda line: repeated[line])
    where = f", of which {time_text(repeated[line])} at {line}" if line else ""
    return [
        f"devices repeat work: if all {math.prod(layout.mesh.values())} devices divided it, compute would take "
        f"{time_text(total)} less{where}"
    ]
