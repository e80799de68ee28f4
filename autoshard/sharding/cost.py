"""How long one step takes under a layout.

    compute_us = sum over operators of max(flops / peak, bytes / memory bandwidth) on one shard, times its trips
    comm_us    = sum over collectives of latency + wire bytes / link bandwidth, times the trips
    step_us    = compute_us + comm_us - OVERLAP * min(compute_us, comm_us)

flops are those of contractions and convolutions; bytes are an operator's operands and results where it is a
contraction, a gather or a reduction, and FUSED of its results elsewhere (XLA fuses elementwise chains). What moves is
what `strategy.choose` says for operators at which the layout decides; between others, an axis that leaves a logical
axis of an activation is an all-gather, or an all-to-all if it goes to another one of the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard.sharding.axes import LogicalAxes
from autoshard.sharding.decide import decides, home, regathers, strategy, wanted
from autoshard.sharding.layout import Layout
from autoshard.sharding.roles import Roles, itemsize, nbytes
from autoshard.sharding.strategy import Move, flops_of
from autoshard.sharding.targets import Target
from autoshard.spmdrules.place import Spec, axes_of, sent
from autoshard.spmdrules.program import Op

OVERLAP = 0.3
FUSED = 0.5


@dataclass(frozen=True)
class Collective:
    """A collective of one step: its kind, mesh axis, bytes that leave each device, runs a step, and the user's line."""

    kind: str
    axis: str
    wire_bytes: float
    count: float
    time_us: float
    line: str


@dataclass(frozen=True)
class StepCost:
    """What one step costs on one device: times in microseconds, bytes that leave it."""

    step_time_us: float
    compute_us: float
    comm_us: float
    comm_bytes: float
    collectives: tuple[Collective, ...]


@dataclass(eq=False)
class Group:
    """Operators with the same rule, shapes and classes: one of them stands for all."""

    op: Op
    runs: float
    values: list[set[int]] = field(default_factory=list)  # the distinct values at each operand
    count: int = 0


class CostModel:
    """Prices layouts of one program on one target; what two layouts share is priced once."""

    def __init__(self, axes: LogicalAxes, roles: Roles, target: Target, state: Sequence[tuple[int, int]] = ()):
        self.axes, self.roles, self.target, self.state = axes, roles, target, tuple(state)
        self.groups = group(axes)
        self._memo: dict[Any, tuple[float, tuple[Move, ...]]] = {}

    def __call__(self, layout: Layout) -> StepCost:
        """The cost of one step under `layout`."""
        compute, collectives = 0.0, []
        for number, g in enumerate(self.groups):
            time, moves = self._price(number, g, layout)
            compute += time * g.runs
            for move in moves:
                share = (
                    len(g.values[move.array]) / g.count if move.array >= 0 else 1.0
                )  # one gather serves all its users
                collectives.append(self._collective(layout, g.op, move, g.runs * share))
        collectives += self._state_moves(layout)
        comm = sum(c.time_us for c in collectives)
        step = compute + comm - OVERLAP * min(compute, comm)
        return StepCost(step, compute, comm, sum(c.wire_bytes * c.count for c in collectives), tuple(collectives))

    def _collective(self, layout: Layout, op: Op, move: Move, runs: float) -> Collective:
        names = list(layout.mesh)
        inside = layout.ways(names[names.index(move.axis) + 1 :])  # the last mesh axes lie on the nearest devices
        bandwidth = self.target.bandwidth(inside, layout.mesh[move.axis])
        time = self.target.chip.link_latency_us + move.wire_bytes / bandwidth * 1e6
        return Collective(move.kind, move.axis, move.wire_bytes, runs, time * runs, _compat.source_line(op.eqn))

    def _price(self, number: int, g: Group, layout: Layout) -> tuple[float, tuple[Move, ...]]:
        op = g.op
        specs = tuple(home(layout, v) if v >= 0 else () for v in op.operands)
        outs = tuple(wanted(layout, op, v) for v in op.results)
        key = (number, specs, outs, tuple(layout.mesh.items()))
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._price_new(op, layout, specs, outs)
        return found

    def _price_new(
        self, op: Op, layout: Layout, specs: tuple[Spec, ...], outs: tuple[Spec, ...]
    ) -> tuple[float, tuple[Move, ...]]:
        chip = self.target.chip
        out_bytes = sum(nbytes(v.aval) for v in op.eqn.outvars)
        if not decides(op):
            ways = max((layout.ways(a for dim in spec for a in dim) for spec in outs), default=1)
            return FUSED * out_bytes / ways / chip.memory_bandwidth * 1e6, self._plain_moves(op, layout, specs, outs)
        plan = strategy(layout, op, self.target.flops_per_byte)
        ways = layout.ways(a for a, f in plan.factors.items() if f is not None)
        peak = chip.flops if itemsize(op.eqn.outvars[0].aval) <= 2 else chip.flops_f32
        assert op.rule is not None
        arrays = zip((*op.eqn.invars, *op.eqn.outvars), (*op.rule.operands, *op.rule.results), strict=True)
        moved = sum(nbytes(v.aval) / layout.ways(axes_of(plan.spec(dims))) for v, dims in arrays)
        return max(flops_of(op) / ways / peak, moved / chip.memory_bandwidth) * 1e6, plan.moves

    def _plain_moves(self, op: Op, layout: Layout, specs: tuple[Spec, ...], outs: tuple[Spec, ...]) -> tuple[Move, ...]:
        """What moves between an activation's layout before and after an operator at which nothing is decided."""
        batch, moves = self.roles.batch, []
        if not op.results or not any(batch in dim for v in op.results for dim in self.axes.of_value[v]):
            return ()
        after = _class_of_axis(layout, op.results[0], outs[0])
        for i, (v, spec) in enumerate(zip(op.operands, specs, strict=True)):
            if v < 0 or not spec:
                continue
            local = nbytes(self.axes.program.avals[v]) / layout.ways(a for dim in spec for a in dim)
            own = {c for dim in self.axes.of_value[v] for c in dim}
            for axis, cls in _class_of_axis(layout, v, spec).items():
                n, to = layout.mesh[axis], after.get(axis)
                if to != cls and cls in own:
                    kind = "all-to-all" if to in own else "all-gather"
                    moves.append(Move(kind, axis, i, local * sent(kind, n)))
        return tuple(moves)

    def _state_moves(self, layout: Layout) -> list[Collective]:
        found = []
        for move in regathers(layout, [source for source, _ in self.state]):
            bandwidth = self.target.bandwidth(1, layout.ways(move.axes))
            time = self.target.chip.link_latency_us + move.wire_bytes / bandwidth * 1e6
            found.append(Collective("all-gather", move.axes[0], move.wire_bytes, 1.0, time, f"parameters, {move.when}"))
        return found


def _class_of_axis(layout: Layout, value: int, spec: Spec) -> dict[str, int]:
    """Which class each mesh axis of a spec cuts."""
    found: dict[str, int] = {}
    for dim, axes in zip(layout.axes.of_value[value], spec, strict=True):
        parts = list(dim)
        room = [layout.axes.sizes[c] for c in dim]
        for axis in axes:
            while len(parts) > 1 and room[0] == 1:
                del parts[0], room[0]
            if parts:
                found[axis] = parts[0]
                room[0] = max(room[0] // layout.mesh[axis], 1)
    return found


def group(axes: LogicalAxes) -> list[Group]:
    """The operators of a program, those that no layout can tell apart counted together."""
    groups: dict[Any, Group] = {}
    held, inputs = axes.held, set(axes.program.inputs)
    for op in axes.program.ops():
        if op.rule is None:
            continue
        leaves = tuple(axes.of_value[v] if v >= 0 else None for v in (*op.operands, *op.results))
        stored = tuple(axes.of_value[held[v]] if v in held else None for v in op.operands)
        key = (op.name, id(op.rule), leaves, stored, tuple(v in inputs for v in op.operands[:3]))
        g = groups.setdefault(key, Group(op, 0.0, [set() for _ in op.operands]))
        g.runs += op.trips
        g.count += 1
        for seen, v in zip(g.values, op.operands, strict=True):
            seen.add(v)
    return list(groups.values())
