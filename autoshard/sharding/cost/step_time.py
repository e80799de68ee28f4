"""How long one step takes under a layout.

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

Decision points need the collectives of `operator_strategy.choose_strategy`. At other operators, an activation is
gathered over each mesh axis that no longer shards the same logical axis. The collective is an all-to-all if the mesh
axis then shards another logical axis of the same tensor.

Times are those of the device. TPU compilers estimate cycles, too. For kernels that only read and write memory, their
estimates are two to five times as long, by an irregular factor (`benchmarks/compiler_cycles.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.canonical_layout import CanonicalLayout, Names, SpecQueries
from autoshard.sharding.cost.collectives import (
    Collective,
    LiveBuffers,
    Ring,
    StepCost,
    collective,
    merged_reductions,
    step_cost,
)
from autoshard.sharding.cost.constants import ON_CHIP_SHARE
from autoshard.sharding.cost.equivalence_classes import (
    Facts,
    OperatorClass,
    RowsOfBatch,
    SharedOperands,
    ValueClasses,
    distinctly_fixed,
    operator_classes,
    value_classes,
)
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.gathers.constraint_moves import constraint_moves, constraints
from autoshard.sharding.cost.gathers.early_gathers import EarlyGathers, Gathered
from autoshard.sharding.cost.gathers.sequential_gathers import gathered_one_ahead
from autoshard.sharding.cost.known_prices import KnownPrices, Price
from autoshard.sharding.cost.offload_time import HostTraffic
from autoshard.sharding.cost.opaque_memory import OpaqueMemory, trace_opaque_memory
from autoshard.sharding.cost.overlap import Place
from autoshard.sharding.cost.stretches import Stretches
from autoshard.sharding.cost.tiles import filled_tile_fraction, is_row_product
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import AFTER_UPDATE, state_gathers, strategy_for_specs
from autoshard.sharding.layout.operator_strategy import Move, OperatorStrategy, shard_types
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED
from autoshard.sharding.machines.kernel_time import declared_us
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.plan.gather_words import PREFETCH, SEQUENTIAL
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import masked_groups, matmul_flops
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, is_decision_point, is_declared
from autoshard.spmdrules.core.placement import Spec, bytes_sent_per_byte, shard_count
from autoshard.spmdrules.core.rule_builder import GROUPS
from autoshard.spmdrules.custom_ops.kernel_cost import declared_costs
from autoshard.spmdrules.ir.program import Op


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
        self.fusion, self.distinct, self.gather, self.synchronous = fusion, distinct, gather, synchronous
        self.early = EarlyGathers(axes, roles, target) if gather == PREFETCH else None
        self.classes = operator_classes(axes, roles, fusion, distinct)
        self._rows = RowsOfBatch(axes, roles, self.classes)
        self.stretches = Stretches(axes.program, [each.numbers for each in self.classes])
        self.host_traffic = HostTraffic(axes, roles, self.stretches, distinct)
        self.queries = SpecQueries(axes, roles, self.classes, distinct)
        self.known, self._constraints = KnownPrices(axes, roles, fusion, target), constraints(axes.program)
        self._memo: dict[Any, Price] = {}
        self._by_distinct: dict[frozenset[int], CostModel] = {}
        self._original: CostModel | None = None  # the model that was resized to this one

    def resized(self, axes: LogicalAxes) -> CostModel:
        """Return this model for the same operators with logical axes of other sizes (`padding.with_axis_size`)."""
        resized, ops = copy(self), list(axes.program.ops())
        resized.axes, resized._original = axes, self
        resized.classes = [replace(each, op=ops[each.numbers[0]]) for each in self.classes]
        resized.stretches = Stretches(axes.program, [each.numbers for each in resized.classes])
        resized.host_traffic = HostTraffic(axes, self.roles, resized.stretches, self.distinct)
        resized.known = KnownPrices(axes, self.roles, self.fusion, self.target)
        resized._memo, resized._by_distinct = {}, {}
        return resized

    def __call__(self, layout: Layout) -> StepCost:
        """Return the cost of one step under `layout`."""
        distinct = distinctly_fixed(self.axes, self.roles, layout.fixed)
        if distinct != self.distinct:
            return self._distinguishing(distinct)(layout)
        compute, collectives, times_us, moved_rows_us = 0.0, [], [], 0.0
        buffers: dict[Any, LiveBuffers] = {}  # one gather serves all operators that take its result
        gathered: dict[Any, Gathered] = {}
        sequential = self.gather == SEQUENTIAL
        in_order: list[LiveBuffers] = []  # of sequential gathers: each serves one operator
        canonical, assignment = CanonicalLayout(layout, self.queries), self.target.assign(layout.mesh)
        for number, each in enumerate(self.classes):
            price, names = self._price(number, each, canonical)
            compute += price.time_us * each.runs
            times_us.append(price.time_us)
            if price.held_bytes:
                buffers["opaque", number] = LiveBuffers(price.held_bytes, each.members, each.members)
            for move in price.moves:
                new, (name, *others) = each.members, move.axes
                axes = tuple(a for name in move.axes for a in names[name]) if others else names[name]
                if move.array >= 0 and sequential and self._is_state(each.op.operands[move.array]):
                    in_order.append(LiveBuffers(move.local_bytes + move.wire_bytes, each.members, each.members))
                elif move.array >= 0 and not move.hops:
                    new = self._add_moved(buffers, move, axes, each.shared[move.array])
                    if self.early is not None and self._is_state(each.op.operands[move.array]):
                        for some in each.shared[move.array]:
                            key = move.kind, axes, some.number
                            found = Gathered(buffers[key], some.first, move.array, len(collectives))
                            gathered.setdefault(key, found)
                elif move.kind == "reduce-scatter":
                    reduced = LiveBuffers(move.local_bytes, each.members, each.members)
                    buffers["reduced", number, move.array] = reduced
                if len(new):
                    for ops, place in self._places(each.op, move, new):
                        runs = each.runs if ops is each.members else float(self.stretches.trips[ops].sum())
                        ring = Ring(move.hops, price.beside_us) if move.hops else None
                        some = assignment, move.kind, axes, move.local_bytes, runs, each.line, place, ring, ops
                        collectives.append(collective(*some, move.array))
                        if place is None and ring is None and self._rows.are_moved(each.op, move.array):
                            moved_rows_us += collectives[-1].time_us
        collectives += [*self._state_moves(layout), *constraint_moves(self._constraints, layout, self.target)]
        rows_us = float(self._rows.runs @ times_us) + moved_rows_us
        times = self.stretches.times(times_us)
        host = self.host_traffic(layout, times, self.target.chip)
        cost = step_cost(compute, collectives, self.target.chip, host, times, sequential=sequential)
        if self.early is not None:
            others = [some for key, some in buffers.items() if key not in gathered]
            products = [
                us if each.op.name in CONTRACTIONS or is_declared(each.op) else 0.0
                for us, each in zip(times_us, self.classes, strict=True)
            ]
            found = self.early(cost, [*gathered.values()], others, times, self.stretches.times(products))
            return replace(found, rows_us=rows_us)
        ahead = gathered_one_ahead(in_order, self.stretches.number)
        return replace(cost, live_buffers=(*buffers.values(), *ahead), rows_us=rows_us)

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

    def _add_moved(
        self, buffers: dict[Any, LiveBuffers], move: Move, axes: tuple[str, ...], operands: Sequence[SharedOperands]
    ) -> np.ndarray:
        """Add the operands that an operator class moves to `buffers`.

        Returns:
            For each operand that was not in `buffers` yet, the number of the first operator that takes it.
        """
        new, extra = [], move.local_bytes + move.wire_bytes if move.kind == "all-gather" else 0.0
        for some in operands:
            found = buffers.get((move.kind, axes, some.number))
            if found is None:
                buffers[move.kind, axes, some.number] = LiveBuffers(extra, some.first, some.last)
                new.append(some.first)
            else:
                found.first, found.last = np.minimum(found.first, some.first), np.maximum(found.last, some.last)
        return np.concatenate(new) if new else np.zeros(0, int)

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
    def _state_values(self) -> set[int]:
        return {*self.axes.parameter_aliases, *self.axes.program.inputs}

    def _price(self, number: int, op_class: OperatorClass, canonical: CanonicalLayout) -> tuple[Price, Names]:
        """Return the cost of one run of a class's operator, and the mesh axes that its moves name by number."""
        found = canonical(self.queries.of_class[number])
        key = number, found.key
        price = self._memo.get(key)
        if price is None:
            compute = partial(self._price_new, op_class, found.sizes, found.specs, found.sequence)
            price = self._memo[key] = self.known(op_class, found, compute)
        return price, found.names

    def _price_new(
        self,
        op_class: OperatorClass,
        mesh: Mapping[str, int],
        every: Sequence[Spec],
        sequence: Mapping[str, str],
    ) -> Price:
        op, chip, facts = op_class.op, self.target.chip, op_class.facts(self.axes, self.fusion)
        operands, arrays = len(op.operands), len(op.operands) + len(op.results)
        specs, result_specs, memory = every[:operands], every[operands:arrays], every[arrays:]
        if not is_decision_point(op):
            return Price(self._memory_us(facts, mesh, memory, {}), self._plain_moves(op, mesh, specs, result_specs))
        strategy = strategy_for_specs(
            op, specs, result_specs, facts.transfer_bytes, mesh, self.target.link_prices, sequence
        )
        rule = strategy.rule(op)
        moves = strategy.moves if chip.keeps_reduce_scatters else merged_reductions(strategy.moves)
        if strategy.form is not None:
            costs, share = strategy.form.cost.kernels, strategy.form.cost.hidden_share
            time = sum(declared_us(cost, chip) for cost in costs)
            return Price(time, moves, max(cost.held_bytes for cost in costs), share * time)
        if is_declared(op) and (costs := declared_costs(op.eqn, shard_types(op, strategy.rule(op), strategy, mesh))):
            time = sum(declared_us(cost, chip) for cost in costs)
            return Price(time, moves, max(cost.held_bytes for cost in costs))
        if opaque := self._opaque_memory(op, strategy, mesh):
            time = opaque.moved_bytes / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
            time += sum(declared_us(cost, chip) for cost in opaque.costs)
        else:
            dims_of = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True)
            time = self._memory_us(facts, mesh, memory, {v: strategy.spec(dims) for v, dims in dims_of})
        flops_by_type = matmul_flops(op, self.target.platform)
        if flops_by_type and not (op.name in CONTRACTIONS and chip.tile > 1 and is_row_product(rule)):
            shards = math.prod(mesh[a] for a, f in strategy.factors.items() if f is not None)
            if op.name in CONTRACTIONS:
                shards *= filled_tile_fraction(rule, strategy, mesh, chip.tile)
            busy = sum(flops / chip.reached(size, integer=integer) for (size, integer), flops in flops_by_type.items())
            time = max(time, busy / shards * 1e6)
        copied = self._masked_copies(op, strategy, mesh)
        time += 2 * copied / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6  # written and read
        return Price(time, moves, opaque.peak_bytes if opaque else copied)

    def _masked_copies(self, op: Op, strategy: OperatorStrategy, mesh: Mapping[str, int]) -> float:
        """Return the bytes of the masked copies that XLA stores for a grouped product on one shard."""
        groups, operands = masked_groups(op, self.target.platform)
        if not operands:
            return 0.0
        own = groups / math.prod(mesh[a] for a, f in strategy.factors.items() if f == GROUPS)
        return own * sum(nbytes(x) for x in shard_types(op, strategy.rule(op), strategy, mesh)[:operands])

    def _opaque_memory(self, op: Op, strategy: OperatorStrategy, mesh: Mapping[str, int]) -> OpaqueMemory | None:
        """Return the memory of a declared operator on one shard; None for other operators."""
        if not is_declared(op):
            return None
        shapes = tuple((x.shape, x.dtype) for x in shard_types(op, strategy.rule(op), strategy, mesh))
        return trace_opaque_memory(op.eqn.params["fn"], shapes, self.target.platform)

    def _memory_us(
        self, facts: Facts, mesh: Mapping[str, int], memory: Sequence[Spec], resharded: Mapping[int, Spec]
    ) -> float:
        """Return the microseconds of a kernel's reads and writes.

        Args:
            facts: what is known of the kernel.
            mesh: mesh axis -> size.
            memory: the specs of what it reads and writes.
            resharded: value -> the spec in which the operator takes or returns it instead.
        """
        total, on_chip_bytes = 0.0, self.target.chip.on_chip_bytes * ON_CHIP_SHARE
        for (v, whole, narrow, on_chip), spec in zip(facts.memory, memory, strict=True):
            size = whole / shard_count(resharded.get(v, spec), mesh) * narrow
            total += 0.0 if size <= on_chip_bytes * on_chip else size
        return total / (self.target.chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6

    def _plain_moves(
        self, op: Op, mesh: Mapping[str, int], specs: Sequence[Spec], result_specs: Sequence[Spec]
    ) -> tuple[Move, ...]:
        """Return the reshards of activations at an operator that is not a decision point."""
        batch, moves = self.roles.batch, []
        if not op.results or not any(batch in dim for v in op.results for dim in self.axes.of_value[v]):
            return ()
        after = self._class_of_axis(mesh, op.results[0], result_specs[0])
        for i, (v, spec) in enumerate(zip(op.operands, specs, strict=True)):
            if v < 0 or not spec:
                continue
            local = nbytes(self.axes.program.avals[v]) / shard_count(spec, mesh)
            own = {c for dim in self.axes.of_value[v] for c in dim}
            for axis, cls in self._class_of_axis(mesh, v, spec).items():
                n, to = mesh[axis], after.get(axis)
                if to != cls and cls in own:
                    kind = "all-to-all" if to in own else "all-gather"
                    moves.append(Move(kind, (axis,), i, local, local * bytes_sent_per_byte(kind, n)))
        return tuple(moves)

    def _class_of_axis(self, mesh: Mapping[str, int], value: int, spec: Spec) -> dict[str, int]:
        """Return the logical axis that each mesh axis of a spec shards."""
        found: dict[str, int] = {}
        for dim, axes in zip(self.axes.of_value[value], spec, strict=True):
            parts = list(dim)
            room = [self.axes.sizes[c] for c in dim]
            for axis in axes:
                while len(parts) > 1 and room[0] == 1:
                    del parts[0], room[0]
                if parts:
                    found[axis] = parts[0]
                    room[0] = max(room[0] // mesh[axis], 1)
        return found

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
