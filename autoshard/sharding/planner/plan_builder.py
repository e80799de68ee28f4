"""Builds the plan of the candidate that was chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from autoshard import _compat
from autoshard.sharding.cost.exposed_communication import traffic
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.layout.divisibility import multiple, undivided
from autoshard.sharding.layout.fixed_shardings import fixed_conflicts
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.machines.topology import DeviceAssignment
from autoshard.sharding.plan.sharding_plan import Estimate, ShardingPlan
from autoshard.sharding.plan.tensors import KEY_WORDS, SIZE_ONE, Leaf, Padding
from autoshard.sharding.planner.activations import activations
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.captured_arrays import captured_note
from autoshard.sharding.planner.idle_devices import idle_notes
from autoshard.sharding.planner.offload_choice import offload_notes
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.planner.search_summary import search_record
from autoshard.sharding.search.candidate import Candidate, price
from autoshard.sharding.search.layout_search import idle_layouts
from autoshard.sharding.search.padding import padding_gains
from autoshard.spmdrules.core.placement import Spec, to_partition_spec


def build_plan(problem: PlanningProblem, best: Candidate, others: Sequence[Candidate]) -> BoundPlan:
    """Build the plan of a candidate.

    Args:
        problem: the problem that the candidate was priced for.
        best: the candidate.
        others: all candidates that were priced; the plan lists them.
    """
    layout, axes, target = best.layout, problem.axes, problem.machine.target
    notes = _notes(problem, layout)
    state_like = [(problem.program.inputs[i], problem.program.outputs[o]) for i, o in problem.traced.state_like]
    outputs = output_specs(problem.program, layout, [*state_like, *problem.state])
    moved = traffic(best.cost)
    plan = ShardingPlan(
        mesh=abstract_mesh(layout.mesh),
        axis_rules={a: tuple(axes.name(c) for c in layout.table.get(a, ())) for a in layout.mesh},
        storage={role: layout.storage[role] for role in layout.storage},
        inputs=tuple(
            leaf_of(problem, v, path, aval, layout.stored_spec(v), problem.roles.inputs[v])
            for v, path, aval in zip(
                problem.program.inputs, problem.traced.in_paths, problem.traced.in_avals, strict=True
            )
        ),
        outputs=tuple(
            leaf_of(problem, v, path, aval, spec, "")
            for v, path, aval, spec in zip(
                problem.program.outputs, problem.traced.out_paths, problem.traced.out_avals, outputs, strict=True
            )
        ),
        estimate=_estimate(best, problem.memory),
        target=problem.machine.target.name,
        placing=_named_pieces(best.assignment),
        topology=tuple((d.name, d.size) for d in best.assignment.topology.dims),
        links={d.name: (d.link, d.bandwidth) for d in best.assignment.topology.dims},
        traffic=tuple(row for row, _ in moved),
        traffic_us=tuple(times for _, times in moved),
        activations=activations(problem.memory, layout, partial(_axis_names, problem), best.cost.live_buffers),
        compiler_options={target.platform: dict(target.chip.options)} if target.chip.options else {},
        unknown={k: tuple(sorted(set(v))) for k, v in problem.program.unknown.items()},
        notes=notes,
        padding=_padding(problem, best, others),
        fingerprint=problem.traced.fingerprint,
        chosen=best.name,
        candidates=tuple((c.name, c.cost.step_time_us, c.peak_bytes) for c in others),
        history=(search_record(others, problem.search_counts),),
        function=problem.traced.name,
        arguments=problem.traced.arguments,
        axis_sizes={axes.name(c): axes.sizes[c] for c in sorted(axes.names)},
        limit_bytes=problem.limit if math.isfinite(problem.limit) else 0.0,
        offload=dict(problem.traced.offloaded),
        kernels=problem.traced.kernels,
        kernels_word=problem.traced.kernels_word,
        alone=_estimate(
            price("one device", Layout(axes, problem.roles, {}, {}), problem.cost, problem.memory), problem.memory
        ),
    )
    return BoundPlan(plan, problem, layout, best.assignment)


def leaf_of(problem: PlanningProblem, value: int, path: str, aval: Any, spec: Spec, role: str) -> Leaf:
    """The plan's record of an input or result."""
    kind = _compat.HOST_KIND if _compat.is_on_host(aval) else "device"
    axes = _axis_names(problem, value)
    return Leaf(path, tuple(aval.shape), str(aval.dtype), to_partition_spec(spec), axes, role, kind)


def _axis_names(problem: PlanningProblem, value: int) -> tuple[str, ...]:
    axes = problem.axes
    return tuple(
        KEY_WORDS if axes.key_words & {*dim} else "*".join(map(axes.name, dim)) or SIZE_ONE
        for dim in axes.of_value[value]
    )


def _notes(problem: PlanningProblem, layout: Layout) -> tuple[str, ...]:
    notes = [note] if (note := captured_note(problem)) else []
    notes += idle_notes(problem, layout)
    notes += offload_notes(problem)
    for one in undivided(layout):
        size = problem.axes.sizes[one.cls]
        now = f"is sharded {one.shards} ways" if one.shards > 1 else "stays whole"
        notes.append(
            f"{problem.axes.name(one.cls)} ({size}) is not divisible by mesh axes {', '.join(one.over)} "
            f"({one.wanted_shards}): "
            f"it {now}; a size of {multiple(size, one.wanted_shards)} would be sharded {one.wanted_shards} ways"
        )
    user_fixed = {v: s for v, s in layout.fixed.items() if v not in problem.existing}
    return (*notes, *fixed_conflicts(problem.traced, problem.axes, user_fixed))


def _padding(problem: PlanningProblem, best: Candidate, others: Sequence[Candidate]) -> tuple[Padding, ...]:
    """What padding axes that do not divide would save, for this plan and, if plans were searched, for others."""
    idle = []
    if problem.searched and not any(c.layout.fixed for c in others):
        idle = idle_layouts(problem.axes, problem.roles, problem.machine.target.devices, problem.machine.sizes)
    return padding_gains(*problem.models, best, others, problem.limit, idle)


def _estimate(candidate: Candidate, memory: MemoryModel) -> Estimate:
    cost = candidate.cost
    return Estimate(cost.step_time_us, cost.compute_us, cost.comm_us, cost.comm_bytes, candidate.peak_bytes,
                    dict(candidate.memory), memory.host_bytes(candidate.layout), cost.host.nbytes, cost.host.time_us,
                    cost.host.exposed_us)  # fmt: skip


def output_specs(program: Any, layout: Layout, state: Sequence[tuple[int, int]]) -> list[Spec]:
    """The sharding of each result: state as its input is stored, the rest as it is computed."""
    stored_as = {o: i for i, o in state} | {v: v for v in program.inputs}
    batch = layout.roles.batch

    def one(v: int) -> Spec:
        if v in stored_as:
            return layout.stored_spec(stored_as[v])
        if any(batch in dim for dim in layout.axes.of_value[v]):
            return layout.spec(v)
        return layout.gradient_spec(v) or layout.spec(v)  # derived from state, so stored like state: gradients, moments

    return [one(v) for v in program.outputs]


def _named_pieces(assignment: DeviceAssignment) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """A device assignment with the names of the topology's dimensions: mesh axis -> (dimension, size, stride)."""
    dims = assignment.topology.dims
    return {a: tuple((dims[p.dim].name, p.size, p.stride) for p in pieces) for a, pieces in assignment.pieces.items()}
