"""Shardings in the types of Explicit axes: the results that get them, and notes on those that are not followed."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.path_patterns import first_few


def followed_types(problem: PlanningProblem) -> Mapping[int, PartitionSpec]:
    """Return the shardings that results get from their types, by the index of the result.

    State has them if its argument has a sharding already. Else the plan chooses one sharding for the argument and the
    result, so that a step can take its own results.
    """
    dropped = _dropped(problem)
    return {o: spec for o, spec in problem.traced.result_specs.items() if o not in dropped}


def type_notes(problem: PlanningProblem) -> list[str]:
    """Return notes on replicated state, types that do not agree, and results whose types the plan does not follow.

    An array that is made while a mesh with Explicit axes is set is replicated by its type, unless it gets another
    sharding. A plan keeps the types of its arguments.
    """
    traced, notes = problem.traced, list[str]()
    if traced.explicit_mesh is None or problem.machine.target.devices == 1:
        return notes
    state = {i for i, _ in traced.state}
    kept = [
        path
        for i, (value, path) in enumerate(zip(problem.program.inputs, traced.in_names, strict=True))
        if i in state and traced.in_avals[i].ndim and problem.existing.get(value) and not any(problem.existing[value])
    ]
    if kept:
        notes.append(
            f"{first_few(map(repr, kept))} {'is' if len(kept) == 1 else 'are'} replicated by type, over Explicit axes, "
            "and the plan keeps that. To let the plan shard state, give auto_shard mesh= or plan=, or pass shapes"
        )
    if traced.untyped:
        notes.append(
            f"the types of Explicit axes are not used, because they do not agree: {traced.untyped}. The plan chooses "
            "all shardings but those of arguments. To request one, use jax.sharding.reshard or out_sharding="
        )
    if dropped := _dropped(problem):
        names = first_few(repr(traced.in_names[i]) for i in dropped.values())
        notes.append(
            f"the program requests other shardings of the results for {names} than the plan has: these results have "
            "the shardings of their arguments, as state. To get the requested ones, pass arguments that are on the "
            "mesh, or reshard the results after the call"
        )
    return notes


def _dropped(problem: PlanningProblem) -> dict[int, int]:
    """Return the results that are stored like their arguments although their types differ: result -> argument."""
    traced, inputs = problem.traced, problem.program.inputs
    pairs = [*traced.state, *traced.state_like]
    return {o: i for i, o in pairs if o in traced.result_specs and inputs[i] not in problem.existing}
