"""Makes plans: traces a function, finds its logical axes, searches, and binds what was chosen to the function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax

from autoshard import _compat
from autoshard._gc import paused
from autoshard._units import bytes_text
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.axes.axis_names import name_axes
from autoshard.sharding.axes.expert_routing import split_expert_axes
from autoshard.sharding.axes.generated_batches import join_generated_batches
from autoshard.sharding.axes.logical_axes import LogicalAxes, find_axes
from autoshard.sharding.axes.roles import STATE, Role, Roles, batch_axis, find_roles
from autoshard.sharding.axes.state_checks import check_state_kept
from autoshard.sharding.cost.exposed_communication import traffic
from autoshard.sharding.cost.fusion import fuse
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout import plan_request
from autoshard.sharding.layout.fixed_shardings import (
    check_constraints,
    constraint_mesh,
    disagreements,
    fixed_pins,
    own_constraints,
    pin_all,
)
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.machines.device_mesh import Machine, MeshLike, abstract_mesh, existing_placement, find_machine
from autoshard.sharding.machines.topology import DeviceAssignment, Piece
from autoshard.sharding.plan.sharding_plan import Estimate, Plan
from autoshard.sharding.plan.tensors import Leaf, Padding
from autoshard.sharding.planner.activations import activations
from autoshard.sharding.planner.search_summary import searched
from autoshard.sharding.planner.shortlist import LOOKED_AT, Shortlist, without_near_duplicates
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.search.candidate import Candidate, SearchCounts, best_assigned, price
from autoshard.sharding.search.layout_search import idle_layouts, search
from autoshard.sharding.search.padding import Undivided, multiple, undivided, what_padding_wins
from autoshard.spmdrules.core.placement import Spec, from_partition_spec, to_partition_spec

LARGE_CONSTANTS_BYTES = 2**20

PlanLike = str | Mapping[str, Sequence[str]] | Plan


def argnums(donate: int | Sequence[int], static: int | Sequence[int]) -> tuple[int, ...]:
    """Donated argument numbers as they are once the static ones are gone."""
    donated = [donate] if isinstance(donate, int) else list(donate)
    statics = [static] if isinstance(static, int) else list(static)
    return tuple(d - sum(s < d for s in statics) for d in donated)


@paused()
def plan_traced(
    traced: Traced,
    args: Any,
    *,
    mesh: MeshLike | None = None,
    target: str | None = None,
    memory_limit_bytes: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    plan: PlanLike | None = None,
    asked: Shortlist | None = None,
    strict: bool = False,
) -> Plan:
    """The plan of a traced function; see `plan`. `args` holds the arrays whose shardings are taken as they are.

    Where none fits the memory, it is the leanest: `unfit.complain` says so.
    """
    free = mesh is None and target is None and plan is None  # a plan that was asked for says where arrays go
    held_mesh, held = existing_placement(jax.tree.leaves(args)) if free else (None, {})
    constraints = own_constraints(traced)
    if mesh is None and target is None:
        meshes = (held_mesh, constraint_mesh(constraints), _compat.current_mesh())
        mesh = next((m for m in meshes if m is not None), None)
    planner = PlanningProblem(traced, find_machine(mesh, target), memory_limit_bytes, constraints)
    planner.target_given = target is not None
    planner.check_rules_known(strict)
    check_state_kept(traced, planner.axes)
    if isinstance(plan, Plan):
        return planner.rebind(plan)
    candidate, others = planner.choose(plan, {planner.program.inputs[i]: s for i, s in held.items()}, fixed or {})
    if asked and (candidate.fits(planner.limit) or not planner.refuses):
        made = planner.best_of(candidate, others, asked)
    else:
        made = planner.describe(candidate, others)
    planner.tally = SearchCounts()  # a plan that is kept keeps its planner: not all that was priced with it
    return made


class PlanningProblem:
    """One traced function on one machine."""

    def __init__(self, traced: Traced, machine: Machine, limit: float | None, constraints: Sequence[Any] = ()):
        self.traced, self.machine, self.constraints = traced, machine, constraints
        self.held: Mapping[int, Spec] = {}  # input -> where its array lies already
        self.fixed: Mapping[str, Any] = {}  # what the user fixed
        self.target_given = False
        self.limit_given = limit is not None
        self.searched = False  # the plan was asked for, or read
        self.limit = limit if limit is not None else machine.target.chip.memory_bytes
        self.program = traced.program
        self.axes: LogicalAxes = find_axes(self.program)
        self.state = [(self.program.inputs[i], self.program.outputs[o]) for i, o in traced.state]
        state = [i for i, _ in self.state]
        batch = batch_axis(self.program, self.axes, frozenset(state))
        join_generated_batches(self.axes, batch)
        self.roles: Roles = find_roles(self.program, self.axes, state, batch=batch)
        split_expert_axes(self.axes, self.roles)
        self.axes.names = name_axes(self.program, self.axes, self.roles, traced.in_paths)
        self.tally = SearchCounts()

    @property
    def refuses(self) -> bool:
        """Whether what does not fit is an error: a limit was given, or a target that was to be planned for."""
        return self.limit_given or (self.target_given and self.searched)

    @cached_property
    def cost(self) -> CostModel:
        """Prices time."""
        return self.models[0]

    @cached_property
    def memory(self) -> MemoryModel:
        """Prices memory."""
        return self.models[1]

    @cached_property
    def models(self) -> tuple[CostModel, MemoryModel]:
        """What prices layouts of the program."""
        target, donated = self.machine.target, {self.program.inputs[i] for i in self.traced.donated}
        fusion = fuse(self.program, fuses_operands=target.platform == "tpu")
        cost = CostModel(self.axes, self.roles, target, fusion, self.state)
        state = [(i, o) for i, o in self.state if i in donated]
        return cost, MemoryModel(self.axes, self.roles, fusion, state, is_tiled=target.platform == "tpu")

    def check_rules_known(self, strict: bool) -> None:
        """Names the primitives that have no rule."""
        if not self.program.unknown:
            return
        places = "; ".join(f"'{name}'{_place(lines)}" for name, lines in self.program.unknown.items())
        text = (f"auto_shard({self.traced.name}): no rule for {places}. Their operands are gathered and the work is "
                "repeated on every device; write a rule with @autoshard.rule")  # fmt: skip
        if strict:
            raise PlanError(text)
        warnings.warn(text, AutoshardWarning, stacklevel=4)

    def choose(
        self, asked: Any, held: Mapping[int, Spec], fixed: Mapping[str, Any]
    ) -> tuple[Candidate, list[Candidate]]:
        """The candidate to use, and all that were priced."""
        sizes = self.machine.sizes
        self.searched = asked is None
        if asked is None:
            layouts = None
        elif isinstance(asked, str):
            layouts = [(asked, self._requested(asked))]
        else:
            table = plan_request.Table.read(asked)
            meshes = [sizes] if sizes is not None else self._meshes(list(table.columns))
            layouts = [(str(dict(asked)), table.resolve(self.axes, self.roles, m)) for m in meshes]
        self.held, self.fixed = held, fixed
        if layouts is None:
            best, others = self.search(held, fixed, self.tally)
        else:
            layouts = self.pinned(layouts, held, fixed)
            others = [price(name, layout, self.cost, self.memory) for name, layout in layouts]
            fitting = [c for c in others if c.fits(self.limit)]
            by_time, by_peak = (lambda c: c.cost.step_time_us), (lambda c: c.peak_bytes)
            best = best_assigned(min(fitting or others, key=by_time if fitting else by_peak), self.cost)
            if isinstance(asked, str):
                self._refuse_idle(asked, best.layout)
        return best, others

    def search(
        self, held: Mapping[int, Spec], fixed: Mapping[str, Any], tally: SearchCounts | None = None
    ) -> tuple[Candidate, list[Candidate]]:
        """The best of all candidates that hold what is fixed, and all of them; see `search.search`."""
        pin = partial(self.pinned, held=held, fixed=fixed)
        return search(self.axes, self.roles, self.cost, self.memory, self.machine.target.devices, self.limit,
                      self.machine.sizes, pin, tally)  # fmt: skip

    def pinned(self, layouts: Any, held: Mapping[int, Spec], fixed: Mapping[str, Any]) -> Any:
        """Those of the candidates in which what is fixed can hold, with it written in."""
        pin = partial(self._pin, held=held, fixed=fixed)
        return pin_all(layouts, pin, mesh_is_given=self.machine.sizes is not None)

    def _refuse_idle(self, asked: str, layout: Layout) -> None:
        """Refuses words that cut nothing because no size divides: every device would do all of the work."""
        found = undivided(layout)
        if found and self._is_idle(layout):
            pad = " or ".join(f"{self.axes.name(u.cls)} to {multiple(self.axes.sizes[u.cls], u.ways)}" for u in found)
            raise PlanError(
                f"auto_shard({self.traced.name}): plan '{asked}' cuts nothing: "
                f"{'; '.join(map(self._undivided_text, found))}. Pad {pad}, or ask for a plan that divides"
            )

    def _is_idle(self, layout: Layout) -> bool:
        """Whether a layout cuts nothing at all, neither in compute nor where inputs are stored."""
        held = any(any(layout.stored(v)) for v in self.program.inputs)
        return self.machine.target.devices > 1 and not layout.cuts() and not held and not self._is_empty(layout)

    def _is_empty(self, layout: Layout) -> bool:
        """Whether there is nothing to cut: all that the layout would cut is empty, or all arrays are."""
        sizes = [self.axes.sizes[c] for classes in layout.table.values() for c in classes]
        arrays = [aval.shape for v in self.program.inputs if (aval := self.program.avals[v]).shape]
        return (bool(sizes) and not any(sizes)) or (bool(arrays) and all(0 in shape for shape in arrays))

    def _undivided_text(self, one: Undivided) -> str:
        return (
            f"{self.axes.name(one.cls)} {self.axes.sizes[one.cls]} is not divisible by {', '.join(one.over)} {one.ways}"
        )

    def _requested(self, text: str) -> Layout:
        asked = plan_request.parse_request(text)
        sizes = self.machine.sizes
        if sizes is not None and dict(asked.sizes) != dict(sizes):
            raise PlanError(f"plan '{text}' does not fit the mesh {dict(sizes)}: say what its axes are for, such as "
                            f"'{' '.join(f'{a}=dp:{n}' for a, n in sizes.items())}', or give no mesh")  # fmt: skip
        if sizes is not None:
            asked = replace(asked, sizes=sizes, fixed_mesh=True)
        if asked.devices != self.machine.target.devices:
            raise PlanError(f"plan '{text}' takes {asked.devices} devices, {self.machine.target.name} has "
                            f"{self.machine.target.devices}")  # fmt: skip
        missing = [
            k for a, k in asked.kinds.items()
            if asked.sizes[a] > 1 and not plan_request.classes_for(k, self.roles, asked.flags)
        ]  # fmt: skip
        missing += ["seq"] if "seq" in asked.flags and not self.roles.sequence else []
        if missing:
            able = [k for k in plan_request.KINDS if plan_request.classes_for(k, self.roles, asked.flags)]
            names = sorted(set(self.axes.names.values()))
            raise PlanError(f"plan '{text}': the program has no axis for {', '.join(missing)}, it has some for "
                            f"{', '.join(able) or 'nothing'}; its logical axes are {', '.join(names)}")  # fmt: skip
        return plan_request.layout_of(self.axes, self.roles, asked)

    def _meshes(self, names: Sequence[str]) -> list[dict[str, int]]:
        """Every way to spread the devices over named axes."""

        def split(n: int, k: int) -> list[tuple[int, ...]]:
            if k == 1:
                return [(n,)]
            return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in split(n // d, k - 1)]

        return [dict(zip(names, s, strict=True)) for s in split(self.machine.target.devices, len(names))]

    def _pin(self, layout: Layout, held: Mapping[int, Spec], fixed: Mapping[str, Any]) -> None:
        written = {self.traced.in_paths[i]: spec for i, spec in self.traced.written.items()}
        layout.fixed = {
            **fixed_pins(self.traced, self.axes, layout, written, "annotated"),
            **held,
            **fixed_pins(self.traced, self.axes, layout, fixed, "fixed"),
        }
        check_constraints(self.traced.name, self.constraints, layout)

    def best_of(self, best: Candidate, others: Sequence[Candidate], asked: Shortlist) -> Plan:
        """Of the best candidates the one that wins a contest."""
        rest = [c for c in others if c.layout is not best.layout and c.fits(self.limit)]  # one laid anew is the same
        ranked = without_near_duplicates(
            [(c.cost.step_time_us, c.peak_bytes, c) for c in [best, *rest][: LOOKED_AT * asked.count]]
        )
        every = [(c.cost.step_time_us, c.peak_bytes, c) for c in others]
        beyond = asked.beyond(every, self.limit, best.cost.step_time_us if best.fits(self.limit) else math.inf)
        return asked.judge([self.describe(c, others) for *_, c in [*ranked[: asked.count], *beyond]], self.limit)

    def describe(self, best: Candidate, others: Sequence[Candidate]) -> Plan:
        """The candidate as a plan."""
        layout, axes, target = best.layout, self.axes, self.machine.target
        notes = self._notes(layout)
        for note in notes:
            if note.startswith("nothing is "):
                warnings.warn(f"auto_shard({self.traced.name}): {note}", AutoshardWarning, stacklevel=5)
        alike = [(self.program.inputs[i], self.program.outputs[o]) for i, o in self.traced.alike]
        outputs = output_specs(self.program, layout, [*alike, *self.state])
        hides = target.chip.hides
        moved = traffic(best.cost, hides)
        return Plan(
            mesh=abstract_mesh(layout.mesh),
            axis_rules={a: tuple(axes.name(c) for c in layout.table.get(a, ())) for a in layout.mesh},
            storage={role: layout.storage[role] for role in layout.storage},
            inputs=tuple(
                self._leaf(v, path, aval, layout.stored(v), self.roles.inputs[v])
                for v, path, aval in zip(self.program.inputs, self.traced.in_paths, self.traced.in_avals, strict=True)
            ),
            outputs=tuple(
                self._leaf(v, path, aval, spec, "")
                for v, path, aval, spec in zip(
                    self.program.outputs, self.traced.out_paths, self.traced.out_avals, outputs, strict=True
                )
            ),
            estimate=_estimate(best),
            target=self.machine.target.name,
            placing=_placing(best.laying),
            topology=tuple((d.name, d.size) for d in best.laying.topology.dims),
            links={d.name: (d.link, d.bandwidth) for d in best.laying.topology.dims},
            traffic=tuple(row for row, _ in moved),
            traffic_us=tuple(times for _, times in moved),
            activations=activations(self.memory, layout, self._axis_names, best.cost.waiting),
            compiler_options={target.platform: dict(target.chip.options)} if target.chip.options else {},
            unknown={k: tuple(sorted(set(v))) for k, v in self.program.unknown.items()},
            notes=notes,
            padding=self._padding(best, others),
            fingerprint=self.traced.fingerprint,
            chosen=best.name,
            candidates=tuple((c.name, c.cost.step_time_us, c.peak_bytes) for c in others),
            history=(searched(others, self.tally, hides),),
            function=self.traced.name,
            axis_sizes={axes.name(c): axes.sizes[c] for c in sorted(axes.names)},
            limit_bytes=self.limit if math.isfinite(self.limit) else 0.0,
            alone=_estimate(price("one device", Layout(axes, self.roles, {}, {}), self.cost, self.memory)),
            bound=Executable(self.traced, layout, target.flops_per_byte, best.laying, self.machine.mesh, self),
        )

    def _leaf(self, value: int, path: str, aval: Any, spec: Spec, role: str) -> Leaf:
        return Leaf(path, tuple(aval.shape), str(aval.dtype), to_partition_spec(spec), self._axis_names(value), role)

    def _axis_names(self, value: int) -> tuple[str, ...]:
        return tuple("*".join(self.axes.name(c) for c in dim) or "1" for dim in self.axes.of_value[value])

    def _notes(self, layout: Layout) -> tuple[str, ...]:
        notes = []
        if self.memory.constant_bytes > LARGE_CONSTANTS_BYTES:
            notes.append(
                f"the function closes over {bytes_text(self.memory.constant_bytes)} of arrays, which are whole on "
                "every device: pass them as arguments"
            )
        found = undivided(layout)
        why = "; ".join(map(self._undivided_text, found))
        idle = self._is_idle(layout)
        if idle or (found and self.machine.target.devices > 1 and not layout.cuts()):
            notes.append(
                f"nothing is {'sharded' if idle else 'computed in parts'}: every one of the "
                f"{self.machine.target.devices} devices does all of the work "
                f"({why or 'no logical axis of the program can be cut by this plan'})"
            )
        for one in found:
            size = self.axes.sizes[one.cls]
            now = f"is cut into {one.cut}" if one.cut > 1 else "stays whole"
            notes.append(
                f"{self.axes.name(one.cls)} ({size}) is not divisible by mesh axes {', '.join(one.over)} ({one.ways}): "
                f"it {now}; {multiple(size, one.ways)} would be cut into {one.ways}"
            )
        own = {v: s for v, s in layout.fixed.items() if v not in self.held}
        return (*notes, *disagreements(self.traced, self.axes, own))

    def _padding(self, best: Candidate, others: Sequence[Candidate]) -> tuple[Padding, ...]:
        """What padding axes that do not divide would win, by the plan or, if it was searched for, by another."""
        idle = []
        if self.searched and not any(c.layout.fixed for c in others):
            idle = idle_layouts(self.axes, self.roles, self.machine.target.devices, self.machine.sizes)
        return what_padding_wins(*self.models, best, others, self.limit, idle)

    def rebind(self, plan: Plan) -> Plan:
        """A plan that was made elsewhere, for this function."""
        difference = _first_difference(plan, self.traced)
        if difference or plan.fingerprint != self.traced.fingerprint:
            raise PlanError(
                f"this plan was made for another program ({plan.fingerprint}, this is {self.traced.fingerprint}): "
                f"{difference or 'the results differ'}. Plan again, or pass the arguments that it was made for."
            )
        for leaf, value in zip(plan.inputs, self.program.inputs, strict=True):
            here = self._leaf(value, leaf.path, self.program.avals[value], ((),) * len(leaf.shape), "").axes
            if here != leaf.axes:
                raise PlanError(
                    f"this plan was made for another program: the axes of '{leaf.path}' are {leaf.axes} there, {here} "
                    "here. Plan again"
                )
        sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
        numbers = {name: c for c, name in self.axes.names.items()}
        table = {a: tuple(numbers[n] for n in names if n in numbers) for a, names in plan.axis_rules.items()}
        storage: dict[Role, tuple[str, ...]] = {role: plan.storage[role] for role in STATE if role in plan.storage}
        layout = Layout(self.axes, self.roles, sizes, table, storage)
        specs = {
            v: from_partition_spec(leaf.spec, len(leaf.shape))
            for v, leaf in zip(self.program.inputs, plan.inputs, strict=True)
        }
        paths = zip(self.program.inputs, plan.inputs, strict=True)
        self.fixed = {leaf.path: leaf.spec for v, leaf in paths if layout.stored(v) != specs[v]}
        layout.fixed = specs
        bound = Executable(
            self.traced, layout, self.machine.target.flops_per_byte, self._laying(plan), self.machine.mesh, self
        )
        return plan.where(bound=bound)

    def _laying(self, plan: Plan) -> DeviceAssignment:
        """Where a plan's mesh axes lie on this machine; as plainly as can be, if it was made for another."""
        topology = self.machine.target.topology
        numbers = {d.name: i for i, d in enumerate(topology.dims)}
        if not plan.placing or plan.topology != tuple((d.name, d.size) for d in topology.dims):
            return self.machine.target.assign(dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)))
        pieces = {a: tuple(Piece(numbers[d], n, s) for d, n, s in found) for a, found in plan.placing.items()}
        return DeviceAssignment(topology, pieces)


def _place(lines: Sequence[str]) -> str:
    """` at FILE:LINE`, the first of those that are known."""
    known = sorted({line for line in lines if line})
    return f" at {known[0]}" if known else " (it has no source line)"


def _estimate(candidate: Candidate) -> Estimate:
    cost = candidate.cost
    return Estimate(cost.step_time_us, cost.compute_us, cost.comm_us, cost.comm_bytes, candidate.peak_bytes,
                    dict(candidate.memory))  # fmt: skip


def _first_difference(plan: Plan, traced: Traced) -> str:
    """What of the arrays of a plan and of a function differs first; empty where all are alike."""
    if len(plan.inputs) != len(traced.in_paths):
        return f"it has {len(plan.inputs)} inputs, this function {len(traced.in_paths)}"
    for leaf, path, aval in zip(plan.inputs, traced.in_paths, traced.in_avals, strict=True):
        if (leaf.path, leaf.shape, leaf.dtype) != (path, tuple(aval.shape), str(aval.dtype)):
            return f"'{leaf.path}' {leaf.dtype}{list(leaf.shape)} there, '{path}' {aval.dtype}{list(aval.shape)} here"
    if len(plan.outputs) != len(traced.out_paths):
        return f"it has {len(plan.outputs)} results, this function {len(traced.out_paths)}"
    return ""


def output_specs(program: Any, layout: Layout, state: Sequence[tuple[int, int]]) -> list[Spec]:
    """Where each result ends: state where its input is stored, the rest as it is computed."""
    back = {o: i for i, o in state} | {v: v for v in program.inputs}
    batch = layout.roles.batch

    def one(v: int) -> Spec:
        if v in back:
            return layout.stored(back[v])
        if any(batch in dim for dim in layout.axes.of_value[v]):
            return layout.spec(v)
        return layout.gradient_spec(v) or layout.spec(v)  # what is made of state like state: gradients, moments

    return [one(v) for v in program.outputs]


def _placing(laying: DeviceAssignment) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """A laying as a plan keeps it: by the names of the topology's dimensions."""
    dims = laying.topology.dims
    return {a: tuple((dims[p.dim].name, p.size, p.stride) for p in pieces) for a, pieces in laying.pieces.items()}
