"""Binds an existing plan, such as one from JSON, to a program and a machine."""

from __future__ import annotations

from dataclasses import replace

from autoshard.errors import PlanError
from autoshard.sharding.axes.roles import STATE, Role
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.machines.device_assignments import DeviceAssignment
from autoshard.sharding.machines.topology import Piece
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.plan_builder import leaf_of
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.argument_differences import differences_text
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.core.placement import from_partition_spec


def rebind(problem: PlanningProblem, plan: ShardingPlan) -> BoundPlan:
    """Binds a plan to the function of this problem.

    Raises:
        PlanError: the plan was made for another program.
    """
    difference = _first_difference(plan, problem.traced)
    if difference or plan.fingerprint != problem.traced.fingerprint:
        raise PlanError(
            f"this plan was made for another program: {difference or 'the results differ'}. Plan again, or pass the "
            f"arguments that it was made for. (Its fingerprint is {plan.fingerprint}, that of this program is "
            f"{problem.traced.fingerprint}.)"
        )
    for leaf, value in zip(plan.inputs, problem.program.inputs, strict=True):
        here = leaf_of(problem, value, leaf.path, problem.program.avals[value], ((),) * len(leaf.shape), "").axes
        if here != leaf.axes:
            path = named_path(leaf.path, plan.arguments)
            raise PlanError(
                f"this plan was made for another program: the axes of '{path}' are {leaf.axes} in the plan, but {here} "
                "in this program. Plan again"
            )
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    numbers = {name: c for c, name in problem.axes.names.items()}
    table = {a: tuple(numbers[n] for n in names if n in numbers) for a, names in plan.axis_rules.items()}
    storage: dict[Role, tuple[str, ...]] = {role: plan.storage[role] for role in STATE if role in plan.storage}
    layout = Layout(problem.axes, problem.roles, sizes, table, storage, sequence=plan.sequence)
    specs = {
        v: from_partition_spec(leaf.spec, len(leaf.shape))
        for v, leaf in zip(problem.program.inputs, plan.inputs, strict=True)
    }
    paths = zip(problem.program.inputs, plan.inputs, strict=True)
    problem.fixed = {leaf.path: leaf.spec for v, leaf in paths if layout.stored_spec(v) != specs[v]}
    layout.fixed = specs
    return BoundPlan(replace(plan.data(), kernels=problem.traced.kernels), problem, layout, _assignment(problem, plan))


def _assignment(problem: PlanningProblem, plan: ShardingPlan) -> DeviceAssignment:
    """The plan's device assignment; the default one if the plan was made for another machine."""
    topology = problem.machine.target.topology
    numbers = {d.name: i for i, d in enumerate(topology.dims)}
    if not plan.placing or plan.topology != tuple((d.name, d.size) for d in topology.dims):
        return problem.machine.target.assign(dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)))
    pieces = {a: tuple(Piece(numbers[d], n, s) for d, n, s in found) for a, found in plan.placing.items()}
    return DeviceAssignment(topology, pieces)


def _first_difference(plan: ShardingPlan, traced: Traced) -> str:
    """The first difference between the arrays of a plan and of a function; empty if there is none."""
    if len(plan.inputs) != len(traced.in_paths):
        different = differences_text(
            {named_path(leaf.path, plan.arguments): leaf for leaf in plan.inputs},
            dict(zip(traced.in_names, traced.in_avals, strict=True)),
        )
        return f"the plan has {len(plan.inputs)} inputs, this function {len(traced.in_paths)}: {different}"
    for leaf, path, aval in zip(plan.inputs, traced.in_paths, traced.in_avals, strict=True):
        if (leaf.path, leaf.shape, leaf.dtype) != (path, tuple(aval.shape), str(aval.dtype)):
            return (
                f"the plan has '{named_path(leaf.path, plan.arguments)}' {leaf.dtype}{list(leaf.shape)}, this function "
                f"'{named_path(path, traced.arguments)}' "
                f"{aval.dtype}{list(aval.shape)}"
            )
    if len(plan.outputs) != len(traced.out_paths):
        return f"the plan has {len(plan.outputs)} results, this function {len(traced.out_paths)}"
    return ""
