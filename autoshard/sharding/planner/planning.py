"""Plans a traced function: sets up the planning problem, searches, and builds the plan of the chosen candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from autoshard import _compat
from autoshard._gc import paused
from autoshard.sharding.axes.state_checks import check_state_kept
from autoshard.sharding.layout import unrolled_layers
from autoshard.sharding.layout.fixed_shardings import constraint_mesh, program_constraints
from autoshard.sharding.layout.plan_request import moves_keys, parse_request
from autoshard.sharding.layout.request_scaling import scaled_pipelines
from autoshard.sharding.loops.loop_collectives import with_loop_collectives
from autoshard.sharding.loops.slice_gradients import with_added_slices
from autoshard.sharding.loops.split_rows import with_whole_rows
from autoshard.sharding.machines.device_mesh import (
    Machine,
    MeshLike,
    existing_placement,
    find_machine,
    mesh_sizes,
    traced_machine,
)
from autoshard.sharding.machines.option_requests import Part, with_options
from autoshard.sharding.microbatches.choice import plan_in_microbatches
from autoshard.sharding.microbatches.microbatching import AUTO, RowsNotDivided, batch_rows, with_microbatches
from autoshard.sharding.microbatches.replicas import GroupedRows, requested_replicas, with_replicas
from autoshard.sharding.offload.words import Words
from autoshard.sharding.pipeline.choice import (
    plan_of_pipelines,
    plan_with_gathers,
    plan_with_pipelines,
    plan_with_schedules,
    requested_stage_counts,
    stage_counts,
)
from autoshard.sharding.pipeline.constants import LEAST_MICROBATCHES
from autoshard.sharding.pipeline.pipelining import stages_of, with_stages
from autoshard.sharding.pipeline.schedule_words import DEFAULT
from autoshard.sharding.plan.gather_words import ONCE, SEQUENTIAL
from autoshard.sharding.plan.memory_doubt import plan_ranked_us
from autoshard.sharding.plan.overlap_words import Overlap
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.captured_arrays import warn_of_captured_arrays
from autoshard.sharding.planner.constants import SHORTLIST_POOL
from autoshard.sharding.planner.notes.idle_devices import warn_of_idle_devices
from autoshard.sharding.planner.offload_choice import plan_with_offload, warn_of_host_memory
from autoshard.sharding.planner.plan_builder import build_plan
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.planner.rebinding import rebind
from autoshard.sharding.planner.shortlist import Shortlist, without_near_duplicates
from autoshard.sharding.planner.update_choice import plan_with_spread_updates
from autoshard.sharding.program.kernel_records import KernelWord
from autoshard.sharding.program.state_memory import warn_of_state_left_on_device
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.kernel_rewriting import with_kernels
from autoshard.sharding.rewrite.updates.spread_updates import with_spread_updates
from autoshard.sharding.search.candidate import Candidate, SearchCounts
from autoshard.sharding.search.constants import KIND_ERROR
from autoshard.sharding.search.late_sums import promising_groups
from autoshard.spmdrules.core.placement import Spec

PlanLike = str | Mapping[str, Sequence[str]] | ShardingPlan
"""A plan to use: text such as "fsdp:8 tp:4", a table of mesh axes and their logical axes, or a plan."""


@paused()
@_compat.classic_scans()
def plan_traced(
    traced: Traced,
    args: Any,
    *,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    offload: Words = (),
    compiler_options: Sequence[Part] = (),
    gather: str = "",
    overlap: Overlap | None = None,
    kernels: KernelWord = "off",
    microbatches: int | str | None = 1,
    schedule: str | None = None,
    allow_numerics: bool = False,
    shortlist: Shortlist | None = None,
    strict: bool = False,
) -> BoundPlan:
    """Plans a traced function; see `autoshard.plan` for most options.

    If `mesh`, `target` and `plan` are None, arrays among `args` that are already sharded keep their sharding.
    If `microbatches` is None, a plan without a pipeline has one microbatch, and the search may choose a pipeline with
    several. `schedule` is the word of a pipeline's schedule; None chooses it. `shortlist` says how the best candidates
    are compared by the compiler or by running them; None compares them by the estimate alone. If no plan fits the
    memory, the result is the plan that needs the least; the caller passes it to `report_infeasible`.
    """
    word = plan.kernels_word if isinstance(plan, ShardingPlan) else kernels
    if word == "off" and isinstance(plan, str) and moves_keys(plan):
        word = "auto"  # ulysses and ring are ways to run the operators of attention
    traced = with_kernels(traced, word, traced_machine(mesh, target))
    count = plan.microbatches if isinstance(plan, ShardingPlan) else 1 if microbatches is None else microbatches
    numerics = plan.allow_numerics if isinstance(plan, ShardingPlan) else allow_numerics
    words = tuple(plan.offload) if isinstance(plan, ShardingPlan) else offload
    gather = plan.gather if isinstance(plan, ShardingPlan) else gather
    table = plan.overlap if isinstance(plan, ShardingPlan) else overlap
    options: dict[str, Any] = dict(mesh=mesh, target=target, memory_limit_bytes=memory_limit_bytes, fixed=fixed,
                                   plan=plan, compiler_options=compiler_options, gather=gather, overlap=table,
                                   shortlist=shortlist, strict=strict)  # fmt: skip
    planned = partial(_plan_program, args=args, **options)
    stages, schedule = (plan.stages, plan.schedule) if isinstance(plan, ShardingPlan) else (stages_of(plan), schedule)
    if traced.stages > 1:  # a program that is cut already may be planned again
        return plan_with_offload(traced, words, planned)
    counts: list[int] = []
    if plan is None and mesh is None and (schedule or microbatches != 1):
        used, _ = _mesh_in_use(traced, args, mesh, target, plan)
        machine = find_machine(used, target, compiler_options).target
        sizes = None if used is None else mesh_sizes(used)
        counts = requested_stage_counts(machine, sizes) if schedule else stage_counts(machine, sizes)

    def fewer_stages(most: int) -> str:
        """Return the requested plan with at most `most` stages instead; "" if there is no such plan."""
        used, _ = _mesh_in_use(traced, args, mesh, target, plan)
        if used is not None or not isinstance(plan, str):
            return ""
        devices = find_machine(used, target, compiler_options).target.devices
        found = scaled_pipelines(parse_request(plan), devices, batch_rows(traced), most)
        return str(found[0]) if found else ""

    def staged(rewritten: Traced, number: int, schedule: str | None, count: int | str) -> BoundPlan:
        if number == 1:
            return in_microbatches(rewritten, 1, partial(with_microbatches, numerics=numerics), count)

        def of_schedule(word: str) -> BoundPlan:
            cut = partial(with_stages, stages=number, schedule=word, numerics=numerics, fewer=fewer_stages)

            def gathered(once: bool, count: int | str = count) -> BoundPlan:
                return in_microbatches(rewritten, number, partial(cut, gathers_once=once), count, once)

            if gather or isinstance(plan, ShardingPlan):
                return gathered(gather == ONCE)
            made = gathered(False)
            return plan_with_gathers(made, lambda: gathered(True, made.plan.microbatches))

        return of_schedule(schedule) if schedule else plan_with_schedules(of_schedule, DEFAULT)

    def in_microbatches(rewritten: Traced, number: int, cut: Any, count: int | str, once: bool = False) -> BoundPlan:
        planned_so = partial(planned, gather=ONCE) if once else planned
        if plan is not None:
            apart = plan.replicas if isinstance(plan, ShardingPlan) else requested_replicas(plan, gathers_once=once)
            of_rows = partial(with_replicas, cut=cut, replicas=apart)
            return plan_in_microbatches(rewritten, count, planned_so, of_rows, number)
        groups = GroupedRows(rewritten, cut, planned_so)
        return plan_in_microbatches(rewritten, count, groups.planned, groups.cut, number)

    def searched(
        rewritten: Traced, number: int, schedule: str | None, count: int | str, most_us: float = math.inf
    ) -> BoundPlan:
        """Return the best plan with `number` stages, if the user did not request a pipeline.

        The search may leave out plans whose step takes `most_us` microseconds or more.
        """
        if count != 1:
            return staged(rewritten, number, schedule, count)

        def of_schedule(word: str) -> BoundPlan:
            cut = partial(with_stages, stages=number, schedule=word, numerics=numerics, gathers_once=gather == ONCE)
            least = number if schedule else LEAST_MICROBATCHES * number
            groups = GroupedRows(rewritten, cut, partial(planned, slow=set()), most_us, KIND_ERROR)
            try:
                made = plan_in_microbatches(rewritten, AUTO, groups.planned, groups.cut, least)
            except RowsNotDivided:
                made = plan_in_microbatches(rewritten, AUTO, groups.planned, groups.cut, number)

            def once() -> BoundPlan:
                cut_once, planned_once = partial(cut, gathers_once=True), partial(planned, gather=ONCE)
                bound_us = min(most_us, plan_ranked_us(made.plan))
                groups = GroupedRows(rewritten, cut_once, planned_once, bound_us, KIND_ERROR)
                return groups.planned(groups.cut(rewritten, made.plan.microbatches))

            return made if gather else plan_with_gathers(made, once)

        return of_schedule(schedule) if schedule else plan_with_schedules(of_schedule, DEFAULT)

    def with_or_without(rewritten: Traced) -> BoundPlan:
        if schedule and plan is None:
            cut = searched if microbatches is None else staged

            def of_count(number: int) -> BoundPlan:
                return cut(rewritten, number, schedule, count)

            return plan_of_pipelines(traced.name, schedule, counts, of_count)
        plain = partial(staged, rewritten, stages, schedule, count)
        return plan_with_pipelines(counts, count, plain, partial(searched, rewritten))

    return plan_with_offload(traced, words, with_or_without)


def _plan_program(
    traced: Traced,
    args: Any,
    *,
    mesh: MeshLike | None,
    target: str | None,
    memory_limit_bytes: float | None,
    fixed: Mapping[str, Any] | None,
    plan: PlanLike | None,
    compiler_options: Sequence[Part],
    gather: str,
    overlap: Overlap | None,
    shortlist: Shortlist | None,
    strict: bool,
    most_us: float = math.inf,
    slow: set[str] | None = None,
) -> BoundPlan:
    """Plans a traced function whose values are already assigned to device or host memory."""
    constraints = program_constraints(traced)
    mesh, existing = _mesh_in_use(traced, args, mesh, target, plan)
    machine = find_machine(mesh, target, compiler_options)
    if isinstance(plan, ShardingPlan) and plan.requested_options:
        options = plan.compiler_options.get(machine.target.platform, {})
        machine = replace(machine, target=with_options(machine.target, options))
    planned = partial(
        _plan_on, machine=machine, existing=existing, constraints=constraints, target=target,
        memory_limit_bytes=memory_limit_bytes, fixed=fixed, plan=plan, gather=gather, overlap=overlap, strict=strict,
    )  # fmt: skip
    traced = with_added_slices(traced)
    if isinstance(plan, ShardingPlan):
        return planned(with_spread_updates(traced, machine.target.devices) if plan.spread_updates else traced)
    return plan_with_spread_updates(
        traced, machine.target.devices, partial(planned, slow=slow), planned, most_us, shortlist
    )


def _plan_on(
    traced: Traced,
    *,
    machine: Machine,
    existing: Mapping[int, Spec],
    constraints: Any,
    target: str | None,
    memory_limit_bytes: float | None,
    fixed: Mapping[str, Any] | None,
    plan: PlanLike | None,
    gather: str,
    overlap: Overlap | None,
    strict: bool,
    shortlist: Shortlist | None = None,
    most_us: float = math.inf,
    slow: set[str] | None = None,
) -> BoundPlan:
    """Plans a traced function on a machine."""
    traced = with_loop_collectives(traced, machine.target.chip.memory_bytes)
    settings = memory_limit_bytes, constraints, gather, overlap
    problem = PlanningProblem(traced, machine, *settings)
    whole = with_whole_rows(traced, problem.axes, problem.roles, machine.target.devices)
    if whole is not traced:
        traced, problem = whole, PlanningProblem(whole, machine, *settings)
    problem.target_given = target is not None
    problem.check_rules_known(strict)
    problem.check_effects()
    problem.check_stages()
    problem.warn_of_unmoved_names()
    check_state_kept(traced, problem.axes)
    warn_of_state_left_on_device(traced)
    warn_of_captured_arrays(problem)
    if isinstance(plan, ShardingPlan):
        return rebind(problem, plan)
    wanted = plan, {problem.program.inputs[i]: s for i, s in existing.items()}, fixed or {}
    candidate, others = problem.choose(*wanted, most_us, slow=slow)
    if not gather and not candidate.fits(problem.limit) and unrolled_layers.stages_of(problem.axes, problem.roles):
        lean = problem.gathering(SEQUENTIAL)
        found = lean.choose(*wanted)
        if found[0].fits(lean.limit):
            problem, (candidate, others) = lean, found
    if shortlist and (candidate.fits(problem.limit) or not problem.must_fit):
        made = best_of(problem, candidate, others, shortlist)
    else:
        made = build_plan(problem, candidate, others)
    if plan is None and traced.microbatches > 1 and traced.replicas == 1:
        fitting = [c for c in others if c.fits(problem.limit)] or [candidate]
        ticks = traced.microbatches + traced.stages - 1
        made.groups = promising_groups(fitting, problem.cost, ticks, gathers_once=problem.gather == ONCE)
    warn_of_idle_devices(problem, made.layout)
    warn_of_host_memory(traced.name, made.plan)
    problem.search_counts = SearchCounts()  # frees the candidates: a plan keeps its problem
    return made


def _mesh_in_use(
    traced: Traced, args: Any, mesh: MeshLike | None, target: str | None, plan: PlanLike | None
) -> tuple[MeshLike | None, Mapping[int, Spec]]:
    """Return the mesh that is given, or that of placed arguments, of sharding constraints, or of `jax.set_mesh`.

    Returns:
        The mesh, None if there is none; and the specs of placed arguments that a plan keeps, by leaf index.
    """
    if mesh is not None or target is not None:
        return mesh, {}
    existing_mesh, existing = existing_placement(jax.tree.leaves(args)) if plan is None else (None, {})
    current = None if (mesh := _compat.current_mesh()) is None else _compat.all_axes_auto(mesh)
    meshes = (existing_mesh, constraint_mesh(program_constraints(traced)), current)
    found = next((m for m in meshes if m is not None), None)
    # The mesh of a constraint may be abstract. A current mesh with the same axes also has the devices.
    return current if current is not None and found is not None and found.shape == current.shape else found, existing


def best_of(problem: PlanningProblem, best: Candidate, others: Sequence[Candidate], shortlist: Shortlist) -> BoundPlan:
    """Return the plan that the shortlist prefers among the best candidates."""
    # The others may contain the best layout with another device assignment.
    rest = [c for c in others if c.layout is not best.layout and c.fits(problem.limit)]
    ranked = without_near_duplicates(
        [(c.cost.step_time_us, c.peak_bytes, c) for c in [best, *rest][: SHORTLIST_POOL * shortlist.count]]
    )
    every = [(c.cost.step_time_us, c.peak_bytes, c) for c in others]
    beyond = shortlist.beyond(every, problem.limit, best.cost.step_time_us if best.fits(problem.limit) else math.inf)
    chosen = [c for *_, c in [*ranked[: shortlist.count], *beyond]]
    return shortlist.judge([build_plan(problem, c, others) for c in chosen], problem.limit)
