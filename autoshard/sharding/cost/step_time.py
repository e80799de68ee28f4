"""How long one step takes under a layout.

    compute_us = sum over kernels (`fusion`) of max(flops / (0.95 peak tiles), bytes / (0.8 memory bandwidth)) on one
                 shard, times its trips
                 + reduced bytes * 6 / (0.8 memory bandwidth) of gathers and scattered sums that XLA does as all-reduces
    comm_us    = sum over collectives of their time on the links that their mesh axes lie on (`topology`), times trips
    step_us    = compute_us + comm_us - min(hidden_us, HIDING * compute_us)
    hidden_us  = of comm_us, what the chip can do beside compute: gathers of parameters and reductions of gradients, of
                 the kinds that its compiler makes asynchronous (`chips`)

flops are those of contractions and convolutions (`work`), at the peak of their type; tiles is the part of the matrix
unit's tiles that a shard fills (a dimension of 64 on tiles of 128 fills half). bytes are what a kernel reads and writes
(of a declared operator: the kernels `inside`), without what is made and soon read in one run of a loop's body where all
such values that are alive at once have room on the chip (`Fusion.near`). What moves is what `strategy.choose` says for
operators at which the layout decides; between others, an axis that leaves a logical axis of an activation is an
all-gather, or an all-to-all if it goes to another one of the same tensor.

Times are meant for the device. TPU compilers estimate their programs' cycles, and those of kernels that only read and
write memory are two to five times as many as this, by no rule: `benchmarks/compiler_cycles.py` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.canonical_layout import CanonicalLayout, Names, Values
from autoshard.sharding.cost.collectives import Collective, LiveBuffers, StepCost, collective, summed
from autoshard.sharding.cost.equivalence_classes import (
    OperatorClass,
    SharedOperands,
    ValueClasses,
    operator_classes,
    pinned_apart,
    value_classes,
)
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.opaque_memory import OpaqueMemory, inside
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import ONCE_UPDATED, moved_bytes, state_gathers, strategy_at
from autoshard.sharding.layout.operator_strategy import Move, OperatorStrategy
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED, PEAK_REACHED
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import matmul_flops
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, declared, is_decision_point
from autoshard.spmdrules.core.placement import Spec, bytes_sent_per_byte, shard_count
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.ir.program import Op

ON_CHIP_SHARE = 0.5  # of the memory on the chip that the values of a loop's body may take at once to stay there


@dataclass(frozen=True)
class Price:
    """What one run of an operator costs: the time of its kernel, what moves, and the bytes that it holds inside."""

    time_us: float
    moves: tuple[Move, ...]
    held_bytes: float = 0.0


class CostModel:
    """Prices layouts of one program on one target; what two layouts share is priced once."""

    def __init__(
        self,
        axes: LogicalAxes,
        roles: Roles,
        target: Target,
        fusion: Fusion,
        state: Sequence[tuple[int, int]] = (),
        apart: frozenset[int] = frozenset(),
    ):
        self.axes, self.roles, self.target, self.state = axes, roles, target, tuple(state)
        self.fusion, self.apart = fusion, apart
        self.groups = operator_classes(axes, roles, fusion, apart)
        self.values = Values(axes, roles, self.groups)
        self._memo: dict[Any, Price] = {}
        self._others: dict[frozenset[int], CostModel] = {}
        self._before: CostModel | None = None  # of which this is one of other sizes

    def resized(self, axes: LogicalAxes) -> CostModel:
        """The same model of a program with the same operators, on axes of other sizes (`padding.lengthened`)."""
        made, ops = copy(self), list(axes.program.ops())
        made.axes, made._before = axes, self
        made.groups = [replace(g, op=ops[g.numbers[0]]) for g in self.groups]
        made._memo, made._others = {}, {}
        return made

    def __call__(self, layout: Layout) -> StepCost:
        """The cost of one step under `layout`."""
        apart = pinned_apart(self.axes, self.roles, layout.fixed)
        if apart != self.apart:
            return self._telling(apart)(layout)
        compute, collectives = 0.0, []
        there: dict[Any, LiveBuffers] = {}  # what is moved already: one gather serves all that take it
        named, laying = CanonicalLayout(layout, self.values), self.target.assign(layout.mesh)
        for number, g in enumerate(self.groups):
            price, names = self._price(number, g, named)
            compute += price.time_us * g.runs
            if price.held_bytes:
                there["inside", number] = LiveBuffers(price.held_bytes, g.members, g.members)
            for move in price.moves:
                new, axes = g.count, tuple(a for name in move.axes for a in names[name])
                if move.array >= 0:
                    new = self._share(there, move, axes, g.taken[move.array])
                elif move.kind == "reduce-scatter":
                    there["reduced", number, move.array] = LiveBuffers(move.local_bytes, g.members, g.members)
                if new:
                    runs, ahead = g.runs * new / g.count, self._is_ahead(g.op, move)
                    collectives.append(collective(laying, move.kind, axes, move.local_bytes, runs, g.line, ahead))
        collectives += self._state_moves(layout)
        return replace(summed(compute, collectives, self.target.chip), waiting=tuple(there.values()))

    def _telling(self, apart: frozenset[int]) -> CostModel:
        """This model for layouts that tell these inputs from others which are like them."""
        if apart not in self._others:
            if self._before is not None:
                self._others[apart] = self._before._telling(apart).resized(self.axes)
            else:
                shared = self.axes, self.roles, self.target, self.fusion, self.state
                self._others[apart] = CostModel(*shared, apart)
        return self._others[apart]

    def _share(
        self, there: dict[Any, LiveBuffers], move: Move, axes: tuple[str, ...], taken: Sequence[SharedOperands]
    ) -> int:
        """How many of the values that a group needs moved are not there yet; notes who takes them."""
        new, extra = 0, move.local_bytes + move.wire_bytes if move.kind == "all-gather" else 0.0
        for some in taken:
            found = there.get((move.kind, axes, some.number))
            if found is None:
                there[move.kind, axes, some.number] = LiveBuffers(extra, some.first, some.last)
                new += len(some.first)
            else:
                found.first, found.last = np.minimum(found.first, some.first), np.maximum(found.last, some.last)
        return new

    def _is_ahead(self, op: Op, move: Move) -> bool:
        """Whether a collective moves parameters or gradients, for which nothing that is computed meanwhile waits."""
        value = op.operands[move.array] if move.array >= 0 else op.results[-1 - move.array]
        return value in self._state_values or value in self.roles.gradients

    @cached_property
    def _state_values(self) -> set[int]:
        return {*self.axes.parameter_aliases, *self.axes.program.inputs}

    def _price(self, number: int, g: OperatorClass, named: CanonicalLayout) -> tuple[Price, Names]:
        """What one run of a group's operator costs, and the mesh axes behind the numbers in its moves.

        It depends on which dimensions are cut how many ways, not on the names of mesh axes.
        """
        names, mesh, specs = named(self.values.of_group[number])
        key = (number, specs, tuple(mesh.items()))
        found = self._memo.get(key)
        if found is None:
            operands = len(g.op.operands)
            results = operands + len(g.op.results)
            found = self._price_new(g, mesh, specs[:operands], specs[operands:results], specs[results:])
            self._memo[key] = found
        return found, names

    def _price_new(
        self,
        g: OperatorClass,
        mesh: Mapping[str, int],
        specs: Sequence[Spec],
        outs: Sequence[Spec],
        memory: Sequence[Spec],
    ) -> Price:
        op, chip = g.op, self.target.chip
        if not is_decision_point(op):
            return Price(self._memory_us(g, mesh, memory, {}), self._plain_moves(op, mesh, specs, outs))
        plan = strategy_at(op, specs, outs, moved_bytes(self.axes, op), mesh, self.target.flops_per_byte)
        assert op.rule is not None
        if within := self._inside(op, plan, mesh):
            time = within.moved_bytes / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
        else:
            taken = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
            time = self._memory_us(g, mesh, memory, {v: plan.spec(dims) for v, dims in taken})
        if work := matmul_flops(op):
            shards = math.prod(mesh[a] for a, f in plan.factors.items() if f is not None)
            if op.name in CONTRACTIONS:
                shards *= filled(op.rule, plan, mesh, chip.tile)
            busy = sum(flops / (chip.peak(size) * PEAK_REACHED) for size, flops in work.items())
            time = max(time, busy / shards * 1e6)
        return Price(time, plan.moves, within.held_bytes if within else 0.0)

    def _inside(self, op: Op, plan: OperatorStrategy, mesh: Mapping[str, int]) -> OpaqueMemory | None:
        """What a declared operator does on one shard; None of any other."""
        if not declared(op):
            return None
        assert op.rule is not None
        shapes = tuple(
            (
                tuple(n // shard_count((over,), mesh) for n, over in zip(v.aval.shape, plan.spec(dims), strict=True)),
                v.aval.dtype,
            )
            for v, dims in zip(op.eqn.invars, op.rule.operands, strict=True)
        )
        return inside(op.eqn.params["fn"], shapes, fuses_operands=self.target.platform == "tpu")

    def _memory_us(
        self, g: OperatorClass, mesh: Mapping[str, int], memory: Sequence[Spec], where: Mapping[int, Spec]
    ) -> float:
        """The time that a kernel's reads and writes take; `where` says where values are that are not at home."""
        if g.kernel is None:
            return 0.0
        avals, total, room = self.axes.program.avals, 0.0, self.target.chip.on_chip_bytes * ON_CHIP_SHARE
        for v, spec in zip((*g.kernel.reads, *g.kernel.writes), memory, strict=True):
            size = nbytes(avals[v]) / shard_count(where.get(v, spec), mesh) * self.fusion.narrow.get(v, 1.0)
            total += 0.0 if size <= room * self.fusion.near.get(v, 0.0) else size
        return total / (self.target.chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6

    def _plain_moves(
        self, op: Op, mesh: Mapping[str, int], specs: Sequence[Spec], outs: Sequence[Spec]
    ) -> tuple[Move, ...]:
        """What moves between an activation's layout before and after an operator at which nothing is decided."""
        batch, moves = self.roles.batch, []
        if not op.results or not any(batch in dim for v in op.results for dim in self.axes.of_value[v]):
            return ()
        after = self._class_of_axis(mesh, op.results[0], outs[0])
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
        """Which class each mesh axis of a spec cuts."""
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
        """The kinds of the inputs that come back changed."""
        return value_classes(self.axes, self.roles, [source for source, _ in self.state], self.apart)

    def _state_moves(self, layout: Layout) -> list[Collective]:
        updated = self._updated
        laying, early, once = self.target.assign(layout.mesh), [], {}
        for move in state_gathers(layout, updated.examples):
            local = move.wire_bytes / bytes_sent_per_byte("all-gather", layout.ways(move.axes))
            line = f"parameters, {move.when}"
            made = collective(laying, "all-gather", move.axes, local, 1.0, line, ahead=True)
            if move.when == ONCE_UPDATED:
                once[move.value] = made
            else:
                early.append(made)
        of_kind = [once.get(v) for v in updated.examples]
        return early + [made for kind in updated.numbers.tolist() if (made := of_kind[kind]) is not None]


def filled(rule: Rule, plan: OperatorStrategy, mesh: Mapping[str, int], tile: int) -> float:
    """The part of the matrix unit's tiles that one shard of a contraction fills.

    Of the three sizes of a product (rows, columns, what is summed) the longest streams by; the others fill tiles.
    """
    if tile <= 1:
        return 1.0
    cut: dict[str, int] = {}
    for axis, factor in plan.factors.items():
        if factor is not None:
            cut[factor] = cut.get(factor, 1) * mesh[axis]
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    sides = {"rows": (left & out) - right, "columns": (right & out) - left, "summed": (left & right) - out}
    sizes = sorted(
        math.prod(max((rule.factor(f).size or 1) // cut.get(f, 1), 1) for f in side) for side in sides.values()
    )
    return math.prod(n / (-(-n // tile) * tile) for n in sizes[:2])
