"""The planning problem: one traced function on one machine, what is fixed, and the models that price layouts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from autoshard import _compat
from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.axes.roles import is_of_one_row
from autoshard.sharding.cost.peak_memory import MemoryModel
from autoshard.sharding.cost.program_kernels import program_kernels
from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout import plan_request
from autoshard.sharding.layout.divisibility import Undivided, undivided
from autoshard.sharding.layout.fixed_shardings import check_constraints, fixed_specs, with_fixed_shardings
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import strategy_in_layout
from autoshard.sharding.layout.request_scaling import scaled_pipelines, scaled_requests
from autoshard.sharding.layout.sequence_operators import sequence_problems
from autoshard.sharding.layout.sequence_words import sequence_variants
from autoshard.sharding.machines.constants import VIRTUAL_DEVICES
from autoshard.sharding.machines.device_mesh import Machine
from autoshard.sharding.overlap.modules import ModuleOverlap
from autoshard.sharding.pipeline.schedule_words import chunks_of
from autoshard.sharding.plan.mesh_words import requested_names
from autoshard.sharding.program.host_memory import unmoved_names_text
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.search.candidate import Candidate, SearchCounts, best_assigned, candidate_ranked_us, price
from autoshard.sharding.search.layout_search import search
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.reference.coverage import NO_RULE, runs_on_host


class PlanningProblem:
    """One traced function on one machine.

    Attributes:
        traced: the function.
        machine: the machine.
        constraints: the sharding constraints in the user's program.
        existing: input -> the sharding that its array already has.
        fixed: path or pattern -> the sharding that the user fixed.
        gather: the order of gathers of parameters, see `ShardingPlan`.
        overlap: the words of `overlap=`; None without any.
        target_given: whether the user named a target.
        limit_given: whether the user gave a memory limit.
        searched: whether the plan comes from a search; false if it was requested or read.
        limit: memory of one device, in bytes.
        program: the function's operators.
        axes: its logical axes.
        roles: the roles of its inputs and axes.
        state: pairs (input, output) of its state.
        search_counts: the counts of the search.
    """

    def __init__(
        self,
        traced: Traced,
        machine: Machine,
        limit: float | None,
        constraints: Sequence[Any] = (),
        gather: str = "",
        overlap: Mapping[str, Mapping[str, str]] | None = None,
    ):
        self.traced, self.machine, self.constraints, self.gather = traced, machine, constraints, gather
        self.existing: Mapping[int, Spec] = {}
        self.fixed: Mapping[str, Any] = {}
        self.target_given = False
        self.limit_given = limit is not None
        self.searched = False
        self.limit = limit if limit is not None else machine.target.chip.memory_bytes
        self.program = traced.program
        analysis = analyse(traced)
        self.axes, self.state = analysis.axes, analysis.state
        weight = partial(machine.target.link_prices.weight, "all-to-all")
        self.roles = replace(analysis.roles, exchange_weight=weight)
        self.search_counts = SearchCounts()
        self.overlap = self._module_overlap(overlap) if overlap else None

    def _module_overlap(self, table: Mapping[str, Mapping[str, str]]) -> ModuleOverlap:
        inputs, outputs = self.program.inputs, self.program.outputs
        state_like = [(inputs[i], outputs[o]) for i, o in self.traced.state_like]
        return ModuleOverlap(self.traced, self.axes, self.roles, [*state_like, *self.state], table)

    @property
    def must_fit(self) -> bool:
        """Whether it is an error if nothing fits: a limit was given, or a plan was searched for a given target."""
        return self.limit_given or (self.target_given and self.searched)

    @cached_property
    def cost(self) -> CostModel:
        """The model of time."""
        return self.models[0]

    @cached_property
    def memory(self) -> MemoryModel:
        """The model of memory."""
        return self.models[1]

    @cached_property
    def models(self) -> tuple[CostModel, MemoryModel]:
        """The models that price layouts of the program: time and memory."""
        target, donated = self.machine.target, {self.program.inputs[i] for i in self.traced.donated}
        fusion = program_kernels(self.axes, self.roles, target.platform)
        cost = CostModel(self.axes, self.roles, target, fusion, self.state, gather=self.gather,
                         synchronous=self.overlap.synchronous if self.overlap else None)  # fmt: skip
        looped = {v for op in self.program.block.ops if op.name == "scan" for v in op.results}
        moved = {self.program.inputs[i] for i in self.traced.moved_inputs}
        # The new stack of moments that a loop returns is not written over the old one, which the loop still reads.
        state = [(i, o) for i, o in self.state if i in donated and not (i in moved and o in looped)]
        return cost, MemoryModel(self.axes, self.roles, fusion, state, chip=target.chip)

    def gathering(self, gather: str) -> PlanningProblem:
        """Return the same problem with another order of gathers."""
        other = copy(self)
        other.gather, other.search_counts = gather, SearchCounts()
        for name in ("cost", "memory", "models"):
            other.__dict__.pop(name, None)
        return other

    def check_rules_known(self, strict: bool) -> None:
        """Warns of primitives that have no rule; raises a `PlanError` if `strict`."""
        if not self.program.unknown:
            return
        on_host = {name: lines for name, lines in self.program.unknown.items() if runs_on_host(name)}
        opaque = {name: lines for name, lines in self.program.unknown.items() if name not in on_host}
        texts = [f"{_listed(on_host)} {NO_RULE[next(iter(on_host))]}"] if on_host else []
        if opaque:
            texts.append(
                f"no rule for {_listed(opaque)}. Every device gathers the operands and repeats the work. Declare a "
                "rule: by @autoshard.operator for a function that runs it, or by @autoshard.rule for the primitive"
            )
        text = f"auto_shard({self.traced.name}): {'. '.join(texts)}"
        if strict:
            raise PlanError(text)
        warnings.warn(text, AutoshardWarning, stacklevel=users_stacklevel())

    def warn_of_unmoved_names(self) -> None:
        """Warn of names that a checkpoint policy offloads to no effect."""
        if text := unmoved_names_text(self.program):
            warnings.warn(
                f"auto_shard({self.traced.name}): a policy of jax.checkpoint offloads {text}",
                AutoshardWarning,
                stacklevel=4,
            )

    def check_stages(self) -> None:
        """Check that no loop outside of the pipeline runs over its stages.

        Raises:
            PlanError: one does, such as an optimizer that updates layer by layer. Each device would need all layers.
        """
        stages, of_value = self.roles.stages, self.axes.of_value
        if stages is None or stages not in self.axes.stacked:
            return
        loops = [op for op in self.program.ops() for e in op.edges if e.stacked and stages in of_value[e.outer][0]]
        text, advice = "carries a value from layer to layer", "Compute it for all layers at once, such as by jnp.cumsum"
        if any(self.roles.batch in dim for op in loops for v in op.results for dim in of_value[v]):
            text = "takes rows of the batch: a second run of the layers"
            advice = "If the weights are those of the first run, run the layers once, over jnp.stack(inputs, axis=1)"
        place = _place([_compat.source_line(op.eqn) for op in loops])
        raise PlanError(
            f"auto_shard({self.traced.name}): pp:{self.axes.sizes[stages]}, but a loop{place} runs over the layers "
            f"outside of the pipeline and {text}. {advice}, or request a plan without pp"
        )

    def check_effects(self) -> None:
        """Check that every device can run the program's effects.

        Raises:
            PlanError: an ordered debug callback on several devices, which JAX does not support.
        """
        if self.machine.target.devices == 1:
            return
        ordered = [op for op in self.program.ops() if _compat.needs_one_device(op.eqn)]
        if ordered:
            raise PlanError(
                f"auto_shard({self.traced.name}): {ordered[0].name}{_place([_compat.source_line(ordered[0].eqn)])} is "
                f"ordered, which JAX supports on one device only, not on {self.machine.target.devices}. Leave out "
                "ordered=True, or call io_callback(..., ordered=True)"
            )

    def choose(
        self,
        requested: Any,
        existing: Mapping[int, Spec],
        fixed: Mapping[str, Any],
        most_us: float = math.inf,
        *,
        slow: set[str] | None = None,
        only_best: bool = False,
    ) -> tuple[Candidate, list[Candidate]]:
        """The best candidate, and all that were priced.

        Args:
            requested: the requested strategy or table; None to search.
            existing: shardings that arrays already have.
            fixed: shardings that the user fixed.
            most_us: see `search`.
            slow: see `search`.
            only_best: whether layouts of a requested strategy need not be priced if they are certainly slower than
                another one that fits.
        """
        sizes = self.machine.sizes
        self.searched = requested is None
        if requested is None:
            layouts = None
        elif isinstance(requested, str):
            layouts = list(self._requested_layouts(requested))
        else:
            table = plan_request.Table.read(requested)
            meshes = [sizes] if sizes is not None else self._meshes(list(table.columns))
            layouts = [(str(dict(requested)), table.resolve(self.axes, self.roles, m)) for m in meshes]
        self.existing, self.fixed = existing, fixed
        if layouts is None:
            best, others = self.search(existing, fixed, self.search_counts, most_us=most_us, slow=slow)
        else:
            layouts = self.with_fixed_shardings(layouts, existing, fixed)
            others: list[Candidate] = []
            for name, layout in layouts:
                fitting_us = [candidate_ranked_us(c) for c in others if c.fits(self.limit)] if only_best else []
                if not fitting_us or all(least_us <= min(fitting_us) for least_us in self.cost.least_us(layout)):
                    others.append(price(name, layout, self.cost, self.memory, self.limit))
            fitting = [c for c in others if c.fits(self.limit)]
            fastest = min(fitting, key=candidate_ranked_us) if fitting else min(others, key=lambda c: c.peak_bytes)
            best = best_assigned(fastest, self.cost)
            if isinstance(requested, str):
                self._check_shards_something(requested, best.layout)
                if best.name == requested or best.layout.fixed:  # else it was checked, a way of `cp`
                    self._check_sequence(best.name, best.layout)
        return best, others

    def search(self, existing: Mapping[int, Spec], fixed: Mapping[str, Any], counts: SearchCounts | None = None,
               *, most_us: float = math.inf, slow: set[str] | None = None
               ) -> tuple[Candidate, list[Candidate]]:  # fmt: skip
        """The best of all candidates that have the existing and fixed shardings, and all of them; see `search`."""
        pin = partial(self.with_fixed_shardings, existing=existing, fixed=fixed)
        return search(self.axes, self.roles, self.cost, self.memory, self.machine.target.devices, self.limit,
                      self.machine.sizes, pin, counts, most_us, self.traced.microbatches, slow)  # fmt: skip

    def with_fixed_shardings(self, layouts: Any, existing: Mapping[int, Spec], fixed: Mapping[str, Any]) -> Any:
        """Those layouts in which the existing and fixed shardings are possible, with these written into them."""
        pin = partial(self._pin, existing=existing, fixed=fixed)
        return with_fixed_shardings(layouts, pin, mesh_is_given=self.machine.sizes is not None)

    def _check_shards_something(self, strategy: str, layout: Layout) -> None:
        """Raises a `PlanError` if a requested plan shards nothing because it divides no size."""
        found = undivided(layout)
        if found and self.shards_nothing(layout):
            pad = " or ".join(f"{self.axes.name(u.cls)} to {u.padded}" for u in found)
            raise PlanError(
                f"auto_shard({self.traced.name}): plan '{strategy}' shards nothing: "
                f"{'; '.join(map(self.undivided_text, found))}. Pad {pad}, or request another plan"
            )

    def shards_nothing(self, layout: Layout) -> bool:
        """Whether a layout shards nothing at all, neither compute nor stored inputs."""
        if self.machine.target.devices == 1 or layout.sharded_classes() or self.is_empty(layout):
            return False
        return not any(any(layout.stored_spec(v)) for v in self.program.inputs)

    def is_empty(self, layout: Layout) -> bool:
        """Whether there is nothing to shard: all axes that the layout shards are empty, or all arrays are."""
        sizes = [self.axes.sizes[c] for classes in layout.table.values() for c in classes]
        arrays = [aval.shape for v in self.program.inputs if (aval := self.program.avals[v]).shape]
        return (bool(sizes) and not any(sizes)) or (bool(arrays) and all(0 in shape for shape in arrays))

    def undivided_text(self, one: Undivided) -> str:
        """Such as `vocab 50257 is not divisible by tp 8`, or by `8 (dp x tp)`."""
        blocks = f" ({one.size // one.block} blocks of {one.block})" if one.block > 1 else ""
        axis, ways = f"{self.axes.name(one.cls)} {one.size}{blocks}", one.wanted_shards
        over = requested_names(one.over)
        parts = f"{over[0]} {ways}" if len(over) == 1 else f"{ways} ({' x '.join(over)})"
        return f"{axis} is not divisible by {parts}"

    def _check_sequence(self, strategy: str, layout: Layout) -> None:
        """Raises a `PlanError` if attention cannot run as the words of a plan say."""
        strategy_of = partial(strategy_in_layout, layout, prices=self.machine.target.link_prices)
        kinds = plan_request.parse_request(strategy).kinds if plan_request.is_request(strategy) else None
        if problems := sequence_problems(layout, strategy_of, kinds):
            left = [r for r in self.traced.kernels if not r.replaced and r.operator == "attention"]
            more = [f"Not recognised: attention at {r.line}: {r.reason}" for r in left]
            raise PlanError(f"auto_shard({self.traced.name}): plan '{strategy}': {'. '.join([*problems, *more])}")

    def _requested_layouts(self, text: str) -> Iterator[tuple[str, Layout]]:
        """The layouts that a request means: several where `cp` leaves open how keys reach the queries."""
        first = self._requested_layout(text)
        yield text, first
        if "cp" in plan_request.parse_request(text).kinds.values():
            for words in sequence_variants(self.axes, plan_request.parse_request(text)):
                layout = self._requested_layout(words)
                strategy_of = partial(strategy_in_layout, layout, prices=self.machine.target.link_prices)
                if not sequence_problems(layout, strategy_of):
                    yield words, layout

    def _requested_layout(self, text: str) -> Layout:
        request = plan_request.parse_request(text)
        sizes = self.machine.sizes
        if sizes is not None and dict(request.sizes) != dict(sizes):
            example = " ".join(f"{axis}=dp:{size}" for axis, size in sizes.items())
            raise PlanError(
                f"plan '{text}' has the mesh axes {dict(request.sizes)}, but mesh is {dict(sizes)}. Say "
                f"what each axis of the mesh is for, such as plan='{example}', or leave out mesh="
            )
        if sizes is not None:
            request = replace(request, sizes=sizes, fixed_mesh=True)
        if request.devices != self.machine.target.devices:
            raise PlanError(f"plan '{text}' takes {request.devices} devices, but {self.machine.target.name} has "
                            f"{self.machine.target.devices}; {self._ways_to_fit(request)}")  # fmt: skip
        missing = [
            k for a, k in request.kinds.items()
            if request.sizes[a] > 1 and not plan_request.classes_for(k, self.roles, request.flags)
        ]  # fmt: skip
        problems = []
        if missing:
            useful = [k for k in plan_request.KINDS if plan_request.classes_for(k, self.roles, request.flags)]
            lacked = "; ".join(f"{k} shards {plan_request.SHARDS[k]}, but no such axis can be sharded" for k in missing)
            remedy = f"Use one of {', '.join(useful)}" if useful else "It can be sharded with 'state' only"
            names = sorted(set(self.axes.names.values()))
            problems.append(f"{lacked}: its logical axes are {', '.join(names)}. {remedy}")
        if {*missing} & {*plan_request.CONTEXT} and self.roles.sequence:
            looped = " and ".join(map(self.axes.name, self.roles.sequence))
            problems.append(f"A loop runs over {looped}, so each device needs all positions")
        if {*missing} & {*plan_request.CONTEXT} and is_of_one_row(self.axes, self.roles):
            problems.append("The batch has one row, so its positions count as the batch, which dp and fsdp shard. With "
                            "two rows, they are a sequence")  # fmt: skip
        if "tp" in missing:
            problems.append("tp shards weights that are multiplied with rows of the batch, and no weight here can be "
                            "sharded that way. Leave 'tp' out")  # fmt: skip
        lacking = self._lacking_for_seq(request) if "seq" in request.flags else []
        if lacking:
            problems.append(f"'seq' makes tp shard the sequence too, but {' and '.join(lacking)}. Leave 'seq' out")
        if problems:
            raise PlanError(f"plan '{text}': {'. '.join(problems)}")
        return plan_request.layout_of(self.axes, self.roles, request)

    def _ways_to_fit(self, request: plan_request.Request) -> str:
        """What to do about a request that takes another number of devices than the machine has."""
        target, rows = self.machine.target, 0 if self.roles.batch is None else self.axes.sizes[self.roles.batch]
        ways = []
        if not self.target_given and target.platform == "cpu" and request.devices > target.devices:
            ways.append(f"start with XLA_FLAGS={VIRTUAL_DEVICES}={request.devices}")
        if target.devices > 1:
            found = self._scaled(request, rows * self.traced.replicas)
            ways += [f"request '{fitting}'" for fitting in found[:1]]
        return ", or ".join([*ways, f"plan for a target of {request.devices} devices"])

    def _scaled(self, request: plan_request.Request, rows: int) -> list[plan_request.Request]:
        """The scalings of a request to the machine's devices that the program allows."""
        traced, devices = self.traced, self.machine.target.devices
        if traced.stages == 1:
            return scaled_requests(request, devices, rows)
        most = min(sum(traced.stage_layers) // chunks_of(traced.schedule), traced.microbatches)
        return scaled_pipelines(request, devices, rows, most)

    def _lacking_for_seq(self, request: plan_request.Request) -> list[str]:
        """What the word `seq` needs and a plan or the program lacks."""
        has_tp = any(kind == "tp" and request.sizes[a] > 1 for a, kind in request.kinds.items())
        tp_axes = plan_request.classes_for("tp", self.roles, frozenset())
        lacking = [] if has_tp else ["the plan has no tp"]
        lacking += [] if tp_axes or self.roles.sequence else ["the program has no axis for tp"]
        return lacking + ([] if self.roles.sequence else ["the program has no sequence"])

    def _meshes(self, names: Sequence[str]) -> list[dict[str, int]]:
        """All meshes with these axes over the devices."""

        def split(n: int, k: int) -> list[tuple[int, ...]]:
            if k == 1:
                return [(n,)]
            return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in split(n // d, k - 1)]

        return [dict(zip(names, s, strict=True)) for s in split(self.machine.target.devices, len(names))]

    def _pin(self, layout: Layout, existing: Mapping[int, Spec], fixed: Mapping[str, Any]) -> None:
        written = {self.traced.in_paths[i]: spec for i, spec in self.traced.annotated.items()}
        layout.fixed = {
            **fixed_specs(self.traced, self.axes, layout, written, "annotated"),
            **existing,
            **fixed_specs(self.traced, self.axes, layout, fixed, "fixed"),
        }
        check_constraints(self.traced.name, self.constraints, layout)


def _listed(unknown: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"'{name}'{_place(lines)}" for name, lines in unknown.items())


def _place(lines: Sequence[str]) -> str:
    """The first known line, as ` at FILE:LINE`."""
    known = sorted({line for line in lines if line})
    return f" at {known[0]}" if known else " (it has no source line)"
