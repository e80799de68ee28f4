"""A note on state that stays replicated because its type says so."""

from __future__ import annotations

from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.path_patterns import first_few


def type_notes(problem: PlanningProblem) -> list[str]:
    """Return a note that names the state that is replicated over Explicit axes; empty if there is none.

    An array that is made while a mesh with Explicit axes is set is replicated by its type, unless it gets another
    sharding. A plan keeps the types of its arguments.
    """
    traced = problem.traced
    if traced.explicit_mesh is None or problem.machine.target.devices == 1:
        return []
    state = {i for i, _ in traced.state}
    kept = [
        path
        for i, (value, path) in enumerate(zip(problem.program.inputs, traced.in_names, strict=True))
        if i in state and traced.in_avals[i].ndim and problem.existing.get(value) and not any(problem.existing[value])
    ]
    if not kept:
        return []
    return [
        f"{first_few(map(repr, kept))} {'is' if len(kept) == 1 else 'are'} replicated by type, over Explicit axes, and "
        "the plan keeps that. To let the plan shard state, give auto_shard mesh= or plan=, or pass shapes"
    ]
