"""The time of one step under a layout.

    compute_us = sum over kernels (`fusion`) of max(flops / (efficiency x peak x tiles), bytes / bandwidth) on one
                 shard, times their runs
                 + ALL_REDUCE_PASSES[kind] x reduced bytes / bandwidth, for gathers and reduce-scatters that XLA
                 replaces by an all-reduce
    efficiency = the fraction of its peak that the chip reaches (`chips`)
    bandwidth  = BANDWIDTH_REACHED x memory bandwidth
    comm_us    = sum over collectives of their time on the links between their devices (`topology`), times their runs
    step_us    = compute_us + exposed_us + host_us
    exposed_us = the part of comm_us that compute does not hide (`overlap`)
    host_us    = the exposed part of transfers to and from host memory (`offload_time`)

`flops` are those of contractions and convolutions, `peak` is that of their dtype. `tiles` is the fraction of the
matrix unit's tiles that a shard fills: a dimension of 64 fills half of a tile of 128. `bytes` are what a kernel reads
and writes (for a declared operator, `opaque_memory`), without values that stay in on-chip memory (`Fusion.on_chip`).
An operator with a declared cost is priced by that (`machines.kernel_time`).

`prices.operator_price` says which collectives an operator needs.

Times are those of the device. TPU compilers estimate cycles, too. For kernels that only read and write memory, their
estimates are two to five times as long, by an irregular factor (`benchmarks/compiler_cycles.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.axes.stored_values import sources_of
from autoshard.sharding.cost.bounds.least_time import LeastTime
from autoshard.sharding.cost.bounds.pipeline_time import PipelineTime
from autoshard.sharding.cost.collectives import (
    Collective,
    LiveBuffers,
    Ring,
    StepCost,
    collective,
    is_hidden_on,
    step_cost,
)
from autoshard.sharding.cost.delays.delayed_gradients import held_until
from autoshard.sharding.cost.delays.delayed_products import DelayedProducts, ends_of_bodies
from autoshard.sharding.cost.equivalence_classes import (
    OperatorClass,
    ValueClasses,
    distinctly_fixed,
    operator_classes,
    value_classes,
)
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.gathers.cast_lookups import cast_lookups
from autoshard.sharding.cost.gathers.constraint_moves import constraint_moves, constraints
from autoshard.sharding.cost.gathers.early_gathers import EarlyGathers, Gathered
from autoshard.sharding.cost.gathers.sequential_gathers import gathered_one_ahead
from autoshard.sharding.cost.gathers.shared_gathers import add_moved
from autoshard.sharding.cost.offload_time import HostTraffic
from autoshard.sharding.cost.opaque_memory import OpaqueMemory
from autoshard.sharding.cost.overlap import Place
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout, Names, SpecQueries
from autoshard.sharding.cost.prices.known_prices import KnownPrices
from autoshard.sharding.cost.prices.operator_price import OperatorPrices
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.cost.stretches import Stretches
from autoshard.sharding.cost.tiles import padded_rows
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import AFTER_UPDATE, state_gathers
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.plan.gather_words import PREFETCH, SEQUENTIAL
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, is_declared
from autoshard.spmdrules.core.placement import ReshardKind, axes_of, bytes_sent_per_byte
from autoshard.spmdrules.ir.program import Op

_NONE: frozenset[int] = frozenset()


class CostModel:
    """Prices layouts of one program on one target. What layouts have in common is priced once."""

    def __init__(
        self,
        axes: LogicalAxes,
        roles: Roles,
        target: Target,
        fusion: Fusion,
        state: Sequence[tuple[int, int]] = (),
        distinct: frozenset[int] = frozenset(),
        *,
        gather: str = "",
        synchronous: Mapping[bool, np.ndarray] | None = None,
    ):
        """Analyse what all layouts have in common.

        Args:
            axes: the logical axes of the program.
            roles: the roles of its inputs and axes.
            target: the machine.
            fusion: its kernels.
            state: pairs (input, output) of its state.
            distinct: inputs that layouts distinguish from similar ones.
            gather: the order of gathers of parameters, see `ShardingPlan`.
            synchronous: for gathers (True) and reductions (False), a mask of the operators whose collectives compute
                cannot hide.
        """
        self.axes, self.roles, self.target, self.state = axes, roles, target, tuple(state)
        if gather == PREFETCH or synchronous is not None:  # these gathers move parameters in their own type
            fusion = replace(fusion, rounded=frozenset())
        self.fusion, self.distinct, self.gather, self.synchronous = fusion, distinct, gather, synchronous
        self.early = EarlyGathers(axes, roles, target) if gather == PREFETCH else None
        self._scatters_late = target.platform == "tpu" and "reduce-scatter" in target.chip.hides  # `held_until`
        self.classes = operator_classes(axes, roles, fusion, distinct)
        self.stretches = Stretches(axes.program, [each.numbers for each in self.classes])
        self.host_traffic = HostTraffic(axes, roles, self.stretches, target.chip, distinct)
        self.queries = SpecQueries(axes, roles, self.classes, distinct)
        self.known, self._constraints = KnownPrices(axes, roles, fusion, target), constraints(axes.program)
        self.prices = OperatorPrices(axes, roles, target, fusion)
        self._cast_lookups = cast_lookups(axes.program) if target.platform == "tpu" else {}
        self._padded_rows = padded_rows(axes.program) if target.platform == "tpu" else {}
        self._late = DelayedProducts(axes.program, roles, fusion) if target.platform == "tpu" else None
        self._memo: list[dict[int, Price]] = [{} for _ in self.classes]  # for each class: number of specs -> price
        self._canonical: WeakKeyDictionary[Layout, CanonicalLayout] = WeakKeyDictionary()
        self._least_time, self._pipeline_time = self._new_bounds()
        self._by_distinct: dict[frozenset[int], CostModel] = {}
        self._original: CostModel | None = None  # the model that was resized to this one

    def resized(self, axes: LogicalAxes) -> CostModel:
        """Return this model for the same operators with logical axes of other sizes (`padding.with_axis_size`)."""
        resized, ops = copy(self), list(axes.program.ops())
        resized.axes, resized._original = axes, self
        resized.classes = [replace(each, op=ops[each.numbers[0]]) for each in self.classes]
        resized.stretches = Stretches(axes.program, [each.numbers for each in resized.classes])
        resized.host_traffic = HostTraffic(axes, self.roles, resized.stretches, self.target.chip, self.distinct)
        resized.known = KnownPrices(axes, self.roles, self.fusion, self.target)
        resized.prices = OperatorPrices(axes, self.roles, self.target, self.fusion)
        resized._memo, resized._by_distinct = [{} for _ in resized.classes], {}
        resized._canonical = WeakKeyDictionary()
        resized._least_time, resized._pipeline_time = resized._new_bounds()
        return resized

    def _new_bounds(self) -> tuple[LeastTime, PipelineTime]:
        least_us = partial(self.prices.least_us, devices=self.target.devices)
        hides = partial(is_hidden_on, self.target.chip)
        common = self.classes, self.stretches, least_us
        return LeastTime(*common), PipelineTime(*common, self.queries.has_ways, self.target.topology, hides)

    def __call__(self, layout: Layout) -> StepCost:
        """Return the cost of one step under `layout`."""
        distinct = distinctly_fixed(self.axes, self.roles, layout.fixed)
        if distinct != self.distinct:
            return self._distinguishing(distinct)(layout)
        compute, collectives, times_us = 0.0, [], []
        buffers: dict[Any, LiveBuffers] = {}  # one gather serves all operators that take its result
        moved_bytes: dict[Any, float] = {}
        gathered: dict[Any, Gathered] = {}
        sequential = self.gather == SEQUENTIAL
        in_order: list[LiveBuffers] = []  # of sequential gathers: each serves one operator
        waiting: list[LiveBuffers] = []  # of delayed products
        canonical, assignment = self._canonical.pop(layout, None), self.target.assign(layout.mesh)
        if canonical is None:
            canonical = CanonicalLayout(layout, self.queries)
        for number, each in enumerate(self.classes):
            price, names = canonical.priced.get(number) or self._price(number, each, canonical)
            compute += price.time_us * each.runs
            times_us.append(price.time_us)
            held_bytes, inside = price.held_bytes, _NONE
            if price.inside is not None:
                held_bytes, inside = self._held_inside(each, price, price.inside)
            if held_bytes:
                buffers["opaque", number] = LiveBuffers(held_bytes, each.members, each.members, True)
            for move in price.moves:
                new, (name, *others) = each.members if move.array >= 0 else each.reduced_at, move.axes
                axes = tuple(a for name in move.axes for a in names[name]) if others else names[name]
                if move.array >= 0 and sequential and self._is_state(each.op.operands[move.array]):
                    in_order.append(LiveBuffers(move.local_bytes + move.wire_bytes, each.members, each.members))
                elif move.array in inside:
                    new = new if move.array < 0 else np.concatenate([some.first for some in each.shared[move.array]])
                elif move.array >= 0 and not move.hops:
                    narrow = self._cast_lookups.get(each.op.results[0], 1.0) if each.op.results else 1.0
                    narrow *= self._padded_rows.get(each.op.operands[move.array], 1.0)
                    late = self._late is not None and self._late.has(each, move, self._state_values)
                    until = self._delayed_until if late else None
                    new = add_moved(buffers, moved_bytes, move, axes, each.shared[move.array], narrow, until)
                    if self._late is not None and until is not None:
                        waiting += self._late.held(layout, each, move, until)
                    if self.early is not None and self._is_state(each.op.operands[move.array]):
                        for some in each.shared[move.array]:
                            key = move.kind, axes, some.number
                            found = Gathered(buffers[key], some.first, move.array, len(collectives))
                            gathered.setdefault(key, found)
                elif move.kind == "reduce-scatter" and (new is each.members or each.waiting):
                    is_sliced = assignment.links(move.kind, axes).kind == "all-reduce"
                    late = self._scatters_late and self._is_prefetchable(each.op, move)
                    last = self._delayed_until[new] if is_sliced else self._held_until[new] if late else new
                    buffers["reduced", number, move.array] = LiveBuffers(move.local_bytes, new, last)
                if move.array < 0 and each.waiting:
                    first, last = np.array(each.waiting).T
                    buffers["waiting", number, move.array] = LiveBuffers(move.local_bytes, first, last)
                if len(new):
                    for ops, place in self._places(each.op, move, new):
                        runs = each.runs if ops is each.members else float(self.stretches.trips[ops].sum())
                        ring = Ring(move.hops, price.beside_us) if move.hops else None
                        some = assignment, move.kind, axes, move.local_bytes, runs, each.line, place, ring, ops
                        collectives.append(collective(*some, move.array))
        collectives += [*self._state_moves(layout), *constraint_moves(self._constraints, layout, self.target)]
        times = self.stretches.times(times_us)
        host = self.host_traffic(layout, times, self.target.chip)
        cost = step_cost(compute, collectives, self.target.chip, host, times, sequential=sequential)
        if self.early is not None:
            others = [*(some for key, some in buffers.items() if key not in gathered), *waiting]
            products = [
                us if each.op.name in CONTRACTIONS or is_declared(each.op) else 0.0
                for us, each in zip(times_us, self.classes, strict=True)
            ]
            return self.early(cost, [*gathered.values()], others, times, self.stretches.times(products))
        ahead = gathered_one_ahead(in_order, self.stretches.number)
        return replace(cost, live_buffers=(*buffers.values(), *waiting, *ahead))

    def repeated_us(self, layout: Layout) -> Mapping[str, float]:
        """Return the time that a device spends on work that other devices repeat: source line -> microseconds.

        A mesh axis divides the work of an operator if it shards a result or an operand. Sharded state does not count,
        because it is gathered before use. If `n` of `N` devices divide the work, each repeats the share `1 - n / N`.
        """
        distinct = distinctly_fixed(self.axes, self.roles, layout.fixed)
        if distinct != self.distinct:
            return self._distinguishing(distinct).repeated_us(layout)
        form, found = CanonicalLayout(layout, self.queries), defaultdict[str, float](float)
        devices = math.prod(layout.mesh.values())
        for number, each in enumerate(self.classes):
            price, _ = self._price(number, each, form)
            sharded, arrays = form(number), (*each.op.operands, *each.op.results)
            specs = zip(arrays, sharded.specs[: len(arrays)], strict=True)
            dividing = {axis for v, spec in specs if not self._is_state(v) for axis in axes_of(spec)}
            parts = math.prod(sharded.sizes[axis] for axis in dividing)
            if price.time_us and parts < devices:
                found[each.line] += price.time_us * each.runs * (1 - parts / devices)
        return found

    def least_us(self, layout: Layout) -> Iterator[float]:
        """Yield lower bounds of `StepCost.step_time_us` under a layout, from low to high."""
        distinct = distinctly_fixed(self.axes, self.roles, layout.fixed)
        if distinct != self.distinct:
            return self._distinguishing(distinct).least_us(layout)
        assignment = self.target.assign(layout.mesh)

        def timer(kind: ReshardKind, axes: tuple[str, ...], local_bytes: float) -> tuple[float, bool]:
            links = assignment.links(kind, axes)
            return links.time_us(local_bytes * links.factor), is_hidden_on(self.target.chip, links)

        return self._least_time(self._form_of(layout), timer, self._price, self._is_prefetchable)

    def least_of_pipelines_us(
        self, layout: Layout, ways: Callable[[], Sequence[Layout]] | None, *, ticks: float, has_groups: bool
    ) -> Iterator[float]:
        """Yield lower bounds of the step time of pipelines with a layout, from low to high.

        Args:
            layout: the layout.
            ways: returns the layout with each way of attention; None if it shards no sequence.
            ticks: see `PipelineTime`.
            has_groups: see `PipelineTime`.
        """
        distinct = distinctly_fixed(self.axes, self.roles, layout.fixed)
        if distinct != self.distinct:
            other = self._distinguishing(distinct)
            return other.least_of_pipelines_us(layout, ways, ticks=ticks, has_groups=has_groups)
        forms = None if ways is None else lambda: [self._form_of(each) for each in ways()]
        some = self._form_of(layout), self._price, self._is_prefetchable, forms
        return self._pipeline_time(*some, ticks=ticks, has_groups=has_groups)

    def _form_of(self, layout: Layout) -> CanonicalLayout:
        """Return the canonical form of a layout, which is kept until the layout is priced."""
        found = self._canonical.get(layout)
        if found is None:
            found = self._canonical[layout] = CanonicalLayout(layout, self.queries)
        return found

    def _distinguishing(self, distinct: frozenset[int]) -> CostModel:
        """Return this model for layouts that distinguish these inputs from similar ones."""
        if distinct not in self._by_distinct:
            if self._original is not None:
                self._by_distinct[distinct] = self._original._distinguishing(distinct).resized(self.axes)
            else:
                common = self.axes, self.roles, self.target, self.fusion, self.state
                same = {"gather": self.gather, "synchronous": self.synchronous}
                self._by_distinct[distinct] = CostModel(*common, distinct, **same)
        return self._by_distinct[distinct]

    def _held_inside(self, each: OperatorClass, price: Price, memory: OpaqueMemory) -> tuple[float, frozenset[int]]:
        """Return the bytes that an operator holds while it runs, and the moved arrays that are counted among them.

        Operands count as 0, 1, ..., results as -1, -2, ...
        """
        gathered, scattered = defaultdict[int, float](float), defaultdict[int, float](float)
        for move in price.moves:
            if move.array < 0 and move.kind == "reduce-scatter":
                scattered[-1 - move.array] = max(scattered[-1 - move.array], move.local_bytes)
            elif move.kind == "all-gather" and move.array >= 0 and self._is_gathered_for_one(each, move.array):
                gathered[move.array] += move.local_bytes + move.wire_bytes
        return memory.peak_with(gathered, scattered), frozenset([*gathered, *(-1 - n for n in scattered)])

    def _is_gathered_for_one(self, each: OperatorClass, operand: int) -> bool:
        """Whether an operand is gathered when the operator begins, and nothing else takes the gathered value."""
        if (self.gather == SEQUENTIAL or self.early is not None) and self._is_state(each.op.operands[operand]):
            return False
        return all(some.is_moved_for_one for some in each.shared[operand])

    def _places(self, op: Op, move: Move, ops: np.ndarray) -> list[tuple[np.ndarray, Place | None]]:
        """Return the operators of a class that need a collective, and where it runs if compute can hide it."""
        is_before, hidden = move.array >= 0, self._is_prefetchable(op, move)
        if not hidden or self.synchronous is None:
            return [(ops, Place(ops, is_before) if hidden else None)]
        hides = ~self.synchronous[is_before][ops]
        parts = (ops[~hides], None), (ops[hides], Place(ops[hides], is_before))
        return [part for part in parts if len(part[0])]

    def _is_prefetchable(self, op: Op, move: Move) -> bool:
        """Whether a collective moves parameters or gradients, so that compute can hide it."""
        value = op.operands[move.array] if move.array >= 0 else op.results[-1 - move.array]
        return self._is_state(value) or value in self.roles.gradients

    def _is_state(self, value: int) -> bool:
        return value in self._state_values

    @cached_property
    def _held_until(self) -> np.ndarray:
        return held_until(self.axes.program)

    @cached_property
    def _delayed_until(self) -> np.ndarray:
        return np.maximum(self._held_until, ends_of_bodies(self.axes.program))

    @cached_property
    def _state_values(self) -> set[int]:
        return {*sources_of(self.axes, self.roles), *self.axes.program.inputs}

    def _price(self, number: int, op_class: OperatorClass, canonical: CanonicalLayout) -> tuple[Price, Names]:
        """Return the cost of one run of a class's operator, and the mesh axes that its moves name by number."""
        found, known = canonical(number), self._memo[number]
        price = known.get(found.number)
        if price is None:
            compute = partial(self.prices, op_class, found.sizes, found.specs, found.sequence)
            price = known[found.number] = self.known(op_class, found, compute)
        made = canonical.priced[number] = price, found.names
        return made

    @cached_property
    def _updated(self) -> ValueClasses:
        """The classes of the inputs that the step updates."""
        return value_classes(self.axes, self.roles, [source for source, _ in self.state], self.distinct)

    @cached_property
    def _updating(self) -> list[np.ndarray]:
        """For each class of `_updated`, the operators that compute the new values."""
        ops = np.array([self.stretches.of_result.get(result, 0) for _, result in self.state], int)
        return [ops[self._updated.numbers == n] for n in range(len(self._updated.examples))]

    def _state_moves(self, layout: Layout) -> list[Collective]:
        """Return the gathers of stored state outside of operators."""
        updated = self._updated
        assignment, before_loops, after_update = self.target.assign(layout.mesh), [], {}
        for move in state_gathers(layout, updated.examples):
            local = move.wire_bytes / bytes_sent_per_byte("all-gather", layout.shard_count(move.axes))
            line = f"parameters, {move.when}"
            gather = collective(assignment, "all-gather", move.axes, local, 1.0, line)
            if move.when == AFTER_UPDATE:
                after_update[move.value] = gather
            else:
                before_loops.append(replace(gather, place=Place(np.array([self.stretches.first_loop]), True)))
        return before_loops + [
            replace(gather, count=float(len(ops)), time_us=gather.time_us * len(ops),
                    exposed_us=gather.time_us * len(ops), place=Place(ops, False))
            for v, ops in zip(updated.examples, self._updating, strict=True)
            if (gather := after_update.get(v)) is not None
        ]  # fmt: skip
