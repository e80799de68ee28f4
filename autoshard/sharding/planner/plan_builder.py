"""Builds the plan of the candidate that was chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from autoshard import _compat
from autoshard.kernels.block_choice import blocks_of
from autoshard.sharding.cost.collectives import traffic
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.unserved_products import product_notes
from autoshard.sharding.layout.divisibility import undivided
from autoshard.sharding.layout.fixed_shardings import fixed_conflicts
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.lower.gathers.prefetch_notes import prefetch_notes
from autoshard.sharding.machines.device_assignments import DeviceAssignment
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.machines.kernel_rules import written
from autoshard.sharding.machines.option_requests import requested
from autoshard.sharding.overlap.effects import effect_notes
from autoshard.sharding.overlap.module_times import ModuleTimes, estimated_times
from autoshard.sharding.pipeline.choice import once_notes
from autoshard.sharding.pipeline.pipelining import stage_notes
from autoshard.sharding.plan.gather_words import ONCE, PREFETCH, SEQUENTIAL
from autoshard.sharding.plan.mesh_words import requested_names
from autoshard.sharding.plan.program_facts import layer_bytes
from autoshard.sharding.plan.sharding_plan import Estimate, ShardingPlan
from autoshard.sharding.plan.tensors import KEY_WORDS, SIZE_ONE, Leaf, Padding
from autoshard.sharding.planner.activations import activations
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.captured_arrays import captured_note
from autoshard.sharding.planner.notes.explicit_types import followed_types, type_notes
from autoshard.sharding.planner.notes.hindrances import hindrance_notes
from autoshard.sharding.planner.notes.idle_devices import idle_notes
from autoshard.sharding.planner.notes.repeated_work import repeated_work_notes
from autoshard.sharding.planner.notes.single_row import single_row_notes
from autoshard.sharding.planner.notes.spread_updates import spread_update_notes
from autoshard.sharding.planner.offload_choice import host_memory_notes, offload_notes
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.planner.search_summary import search_record
from autoshard.sharding.search.candidate import Candidate, price
from autoshard.sharding.search.layout_search import idle_layouts
from autoshard.sharding.search.padding import padding_gains
from autoshard.spmdrules.core.placement import Spec, from_partition_spec, to_partition_spec


def build_plan(problem: PlanningProblem, best: Candidate, others: Sequence[Candidate]) -> BoundPlan:
    """Build the plan of a candidate.

    Args:
        problem: the problem that the candidate was priced for.
        best: the candidate.
        others: all candidates that were priced; the plan lists them.
    """
    layout, axes, target = best.layout, problem.axes, problem.machine.target
    notes = (*_notes(problem, best), *host_memory_notes(best), *_gather_notes(problem, best))
    notes += (*single_row_notes(layout, best.name),)
    notes += (*hindrance_notes(axes, problem.roles, layout, target, best.cost.step_time_us), *type_notes(problem))
    state_like = [(problem.program.inputs[i], problem.program.outputs[o]) for i, o in problem.traced.state_like]
    outputs = output_specs(problem.program, layout, [*state_like, *problem.state], followed_types(problem))
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
        usable_bytes=best.usable_bytes if math.isfinite(best.usable_bytes) else 0.0,
        host_limit_bytes=best.host_limit if best.host_bytes and math.isfinite(best.host_limit) else 0.0,
        offload=dict(problem.traced.offloaded),
        gather=problem.gather,
        microbatches=problem.traced.microbatches,
        replicas=problem.traced.replicas,
        stages=problem.traced.stages,
        schedule=problem.traced.schedule,
        allow_numerics=bool(problem.traced.own_sums),
        spread_updates=problem.traced.spread_updates,
        overlap=problem.overlap.table if problem.overlap else {},
        module_us=_module_times(problem, best),
        kernel_blocks=_kernel_blocks(problem),
        sequence=dict(layout.sequence),
        kernels=problem.traced.kernels,
        kernels_word=problem.traced.kernels_word,
        alone=_estimate(
            price("one device", Layout(axes, problem.roles, {}, {}), problem.cost, problem.memory), problem.memory
        ),
    )
    return BoundPlan(_with_requested_options(plan, problem), problem, layout, best.assignment)


def _module_times(problem: PlanningProblem, best: Candidate) -> ModuleTimes:
    """The times of the collectives of each module; empty without `overlap=`."""
    if problem.overlap is None:
        return {}
    stretches = problem.cost.stretches
    moved = [(c.ops, c.array, c.time_us, c.exposed_us) for c in best.cost.collectives if c.ops is not None]
    return estimated_times(problem.overlap, stretches.ops, stretches.trips, moved)


def _kernel_blocks(problem: PlanningProblem) -> dict[str, tuple[int, ...]]:
    """The block sizes of the program's kernels, by the shapes of their calls."""
    found = {}
    for op in problem.program.ops():
        blocks = blocks_of(op.eqn.params.get("fn"))
        if blocks is not None:
            q, k, v = (problem.program.avals[value] for value in op.operands[:3])
            shape = (q.shape[3], k.shape[2], q.shape[4], v.shape[3], q.dtype.itemsize)
            found["x".join(map(str, shape))] = written(blocks)
    return found


def _with_requested_options(plan: ShardingPlan, problem: PlanningProblem) -> ShardingPlan:
    """The plan with the options that the user requested, some of which depend on the plan's layers."""
    request, target = problem.machine.option_request, problem.machine.target
    if not request:
        return plan
    options, own = requested(request, target, layer_bytes(plan))
    return plan.where(compiler_options={target.platform: options}, requested_options=own)


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


def _notes(problem: PlanningProblem, best: Candidate) -> tuple[str, ...]:
    layout, notes = best.layout, [note] if (note := captured_note(problem)) else []
    idle = idle_notes(problem, layout)
    notes += idle or repeated_work_notes(problem, layout, best.cost.step_time_us)
    notes += offload_notes(problem)
    notes += own_sum_notes(problem)
    notes += spread_update_notes(layout)
    notes += stage_notes(problem.traced)
    notes += product_notes(problem.program, problem.machine.target.chip, problem.machine.target.name)
    if problem.overlap is not None:
        updated, sequential = tuple(i for i, _ in problem.state), problem.gather == SEQUENTIAL
        notes += effect_notes(problem.overlap, layout, problem.machine.target, sequential=sequential, updated=updated)
    for one in undivided(layout):
        if any(problem.undivided_text(one) in note for note in idle):
            continue
        now = f"is sharded {one.shards} ways" if one.shards > 1 else "stays whole"
        over = ", ".join(requested_names(one.over))
        notes.append(
            f"{problem.axes.name(one.cls)} ({one.size}) is not divisible by mesh axes {over} ({one.wanted_shards}): "
            f"it {now}; a size of {one.padded} would be sharded {one.wanted_shards} ways"
        )
    user_fixed = {v: s for v, s in layout.fixed.items() if v not in problem.existing}
    return (*notes, *fixed_conflicts(problem.traced, problem.axes, user_fixed))


def own_sum_notes(problem: PlanningProblem) -> list[str]:
    """A note that names the lines whose numbers microbatches change."""
    found, count = problem.traced.own_sums, problem.traced.microbatches
    if not found:
        return []
    return [f"microbatches={count} changes the numbers, as allow_numerics permits: {', '.join(found)} "
            "of each microbatch in place of that of the batch"]  # fmt: skip


def _gather_notes(problem: PlanningProblem, best: Candidate) -> list[str]:
    if problem.gather == ONCE:
        return once_notes(best.layout)
    if problem.gather != PREFETCH:
        return []
    paths = dict(zip(problem.program.inputs, problem.traced.in_paths, strict=True))
    prices = problem.machine.target.link_prices
    return list(prefetch_notes(best.layout, prices, best.cost.early, lambda v: paths.get(v, "an array")))


def _padding(problem: PlanningProblem, best: Candidate, others: Sequence[Candidate]) -> tuple[Padding, ...]:
    """How much padding of indivisible axes would save, for this plan and, if plans were searched, for others."""
    idle = []
    if problem.searched and not any(c.layout.fixed for c in others):
        idle = idle_layouts(problem.axes, problem.roles, problem.machine.target.devices, problem.machine.sizes)
    return padding_gains(*problem.models, best, others, problem.limit, idle)


def _estimate(candidate: Candidate, memory: MemoryModel) -> Estimate:
    cost = candidate.cost
    return Estimate(cost.step_time_us, cost.compute_us, cost.comm_us, cost.comm_bytes, candidate.peak_bytes,
                    dict(candidate.memory), candidate.host_bytes, cost.host.nbytes, cost.host.time_us,
                    cost.host.exposed_us)  # fmt: skip


def output_specs(
    program: Any, layout: Layout, state: Sequence[tuple[int, int]], typed: Mapping[int, PartitionSpec]
) -> list[Spec]:
    """The sharding of each result: state as its input is stored, the rest as it is computed.

    Args:
        program: the program.
        layout: the layout.
        state: pairs (input, output) of the state.
        typed: index of a result -> the sharding in its type, which the plan follows (`followed_types`).
    """
    stored_as = {o: i for i, o in state} | {v: v for v in program.inputs}

    def one(v: int) -> Spec:
        if v in stored_as:
            return layout.stored_spec(stored_as[v])
        if layout.roles.have_rows(layout.axes.of_value[v]):
            return layout.spec(v)
        return layout.gradient_spec(v) or layout.spec(v)  # derived from state, so stored like state: gradients, moments

    wanted = {i: from_partition_spec(spec, program.avals[program.outputs[i]].ndim) for i, spec in typed.items()}
    possible = {i: spec for i, spec in wanted.items() if all(axis in layout.mesh for dim in spec for axis in dim)}
    return [possible.get(i) or one(v) for i, v in enumerate(program.outputs)]


def _named_pieces(assignment: DeviceAssignment) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """A device assignment with the names of the topology's dimensions: mesh axis -> (dimension, size, stride)."""
    dims = assignment.topology.dims
    return {a: tuple((dims[p.dim].name, p.size, p.stride) for p in pieces) for a, pieces in assignment.pieces.items()}
