"""How long one step takes under a layout.

    compute_us = sum over kernels (`fusion`) of max(flops / (0.95 peak tiles), bytes / (0.8 memory bandwidth)) on one
                 shard, times its trips
    comm_us    = sum over collectives of their time on the links that their mesh axes lie on (`topology`), times trips
    step_us    = compute_us + comm_us - min(hidden_us, HIDING * compute_us)
    hidden_us  = of comm_us, what the chip can do beside compute: gathers of parameters and reductions of gradients, of
                 the kinds that its compiler makes asynchronous (`chips`)

flops are those of contractions and convolutions (`work`), at the peak of their type; tiles is the part of the matrix
unit's tiles that a shard fills (a dimension of 64 on tiles of 128 fills half). bytes are what a kernel reads and writes
(of a declared operator: the kernels `inside`), without what is made and read in one run of a loop's body and small
enough to stay on the chip (`chips`). What moves is what `strategy.choose` says for operators at which the layout
decides; between others, an axis that leaves a logical axis of an activation is an all-gather, or an all-to-all if it
goes to another one of the same tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes import LogicalAxes
from autoshard.sharding.decide import decides, declared, home, regathers, strategy_at, wanted
from autoshard.sharding.fusion import Fusion, Kernel
from autoshard.sharding.inside import Inside, inside
from autoshard.sharding.layout import Layout
from autoshard.sharding.roles import Roles, itemsize, nbytes
from autoshard.sharding.strategy import Move, Strategy
from autoshard.sharding.targets import Target
from autoshard.sharding.topology import Laying, layings
from autoshard.sharding.uses import CONTRACTIONS
from autoshard.sharding.work import products
from autoshard.spmdrules.place import ReshardKind, Spec, sent, ways
from autoshard.spmdrules.program import Block, Op
from autoshard.spmdrules.rule import Rule

HIDING = 0.9  # the part of a step's compute that can hide traffic
MOST_LAYINGS = 64  # tried for each order of the axes
PEAK_REACHED = 0.95  # of a chip's operations per second by large products
BANDWIDTH_REACHED = 0.8  # of its memory's
ON_CHIP_SHARE = 0.25  # of the memory on the chip that one value may take to stay there: several are alive at once


@shown
@dataclass(frozen=True)
class Collective:
    """A collective of one step.

    Attributes:
        kind: what XLA makes of it.
        axes: the mesh axes that it runs over, at once.
        asked: what is asked for: another kind where XLA cannot do it on the devices where the axes lie.
        local_bytes: what a device has before what is asked for.
        wire_bytes: bytes that leave each device in one run.
        count: runs a step.
        time_us: of all its runs.
        line: the user's.
        ahead: whether nothing that is computed meanwhile waits for it: it moves parameters or gradients.
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    asked: ReshardKind
    local_bytes: float
    wire_bytes: float
    count: float
    time_us: float
    line: str
    ahead: bool = False


@shown
@dataclass(eq=False)
class Waiting:
    """Bytes on a device of what is gathered for operators (by identity), waits behind one, or is held inside one."""

    nbytes: float
    ops: list[int]


@shown
@dataclass(frozen=True)
class StepCost:
    """What one step costs on one device: times in microseconds, bytes that leave it."""

    step_time_us: float
    compute_us: float
    comm_us: float
    comm_bytes: float
    collectives: tuple[Collective, ...]
    waiting: tuple[Waiting, ...] = field(default=(), repr=False)


@dataclass(eq=False)
class Group:
    """Operators with the same rule, shapes and classes: one of them stands for all."""

    op: Op
    kernel: Kernel | None
    runs: float
    # at each operand: what it is of and in which loop -> the operators that take it, by identity
    takers: list[dict[tuple[int, int], list[int]]] = field(default_factory=list)
    members: list[int] = field(default_factory=list)  # its operators, by identity

    @property
    def count(self) -> int:
        """How many operators it stands for."""
        return len(self.members)


class CostModel:
    """Prices layouts of one program on one target; what two layouts share is priced once."""

    def __init__(
        self, axes: LogicalAxes, roles: Roles, target: Target, fusion: Fusion, state: Sequence[tuple[int, int]] = ()
    ):
        self.axes, self.roles, self.target, self.state = axes, roles, target, tuple(state)
        self.fusion = fusion
        self.groups = group(axes, roles, fusion)
        self._memo: dict[Any, tuple[float, tuple[Move, ...], float]] = {}

    def __call__(self, layout: Layout) -> StepCost:
        """The cost of one step under `layout`."""
        compute, collectives = 0.0, []
        there: dict[Any, Waiting] = {}  # what is moved already: one gather serves all that take it
        for number, g in enumerate(self.groups):
            time, moves, held = self._price(number, g, layout)
            compute += time * g.runs
            if held:
                there |= {("inside", op): Waiting(held, [op]) for op in g.members}
            for move in moves:
                new = g.count
                if move.array >= 0:
                    new = self._share(there, move, g.takers[move.array])
                elif move.kind == "reduce-scatter":
                    there |= {("reduced", op, move.array): Waiting(move.local_bytes, [op]) for op in g.members}
                if new:
                    collectives.append(self._collective(layout, g.op, move, g.runs * new / g.count))
        collectives += self._state_moves(layout)
        return replace(summed(compute, collectives, self.target.chip.hides), waiting=tuple(there.values()))

    def _share(self, there: dict[Any, Waiting], move: Move, takers: Mapping[tuple[int, int], list[int]]) -> int:
        """How many of the values that a group needs moved are not there yet; notes who takes them."""
        new, extra = 0, move.local_bytes + move.wire_bytes if move.kind == "all-gather" else 0.0
        for what, ops in takers.items():
            found = there.get((move.kind, move.axes, what))
            if found is None:
                there[move.kind, move.axes, what] = Waiting(extra, list(ops))
                new += 1
            else:
                found.ops.extend(ops)
        return new

    def _collective(self, layout: Layout, op: Op, move: Move, runs: float) -> Collective:
        line, value = (
            _compat.source_line(op.eqn),
            (op.operands[move.array] if move.array >= 0 else op.results[-1 - move.array]),
        )
        ahead = value in self._state_values or value in self.roles.gradients
        return collective(self.target.lay(layout.mesh), move.kind, move.axes, move.local_bytes, runs, line, ahead)

    @cached_property
    def _state_values(self) -> set[int]:
        return {*self.axes.held, *self.axes.program.inputs}

    def _price(self, number: int, g: Group, layout: Layout) -> tuple[float, tuple[Move, ...], float]:
        """The time of one run of a group's kernel, what moves, and the bytes that it holds inside.

        It depends on which dimensions are cut how many ways, not on the names of mesh axes.
        """
        op = g.op
        specs = [home(layout, v) if v >= 0 else () for v in op.operands]
        outs = [wanted(layout, op, v) for v in op.results]
        memory = [home(layout, v) for v in (*g.kernel.reads, *g.kernel.writes)] if g.kernel else []
        names, mesh, plain = _nameless([*specs, *outs, *memory], layout.mesh)
        key = (number, plain, tuple(mesh.items()))
        found = self._memo.get(key)
        if found is None:
            places, wishes = plain[: len(specs)], plain[len(specs) : len(specs) + len(outs)]
            found = self._memo[key] = self._price_new(g, mesh, places, wishes, plain[len(specs) + len(outs) :])
        time, moves, held = found
        return time, tuple(replace(m, axes=tuple(a for name in m.axes for a in names[name])) for m in moves), held

    def _price_new(
        self, g: Group, mesh: Mapping[str, int], specs: Sequence[Spec], outs: Sequence[Spec], memory: Sequence[Spec]
    ) -> tuple[float, tuple[Move, ...], float]:
        op, chip = g.op, self.target.chip
        if not decides(op):
            return self._memory_us(g, mesh, memory, {}), self._plain_moves(op, mesh, specs, outs), 0.0
        plan = strategy_at(op, specs, outs, mesh, self.target.flops_per_byte)
        assert op.rule is not None
        if within := self._inside(op, plan, mesh):
            time = within.moved_bytes / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
        else:
            taken = zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
            time = self._memory_us(g, mesh, memory, {v: plan.spec(dims) for v, dims in taken})
        if work := products(op):
            shards = math.prod(mesh[a] for a, f in plan.factors.items() if f is not None)
            if op.name in CONTRACTIONS:
                shards *= filled(op.rule, plan, mesh, chip.tile)
            busy = sum(flops / (chip.peak(size) * PEAK_REACHED) for size, flops in work.items())
            time = max(time, busy / shards * 1e6)
        return time, plan.moves, within.held_bytes if within else 0.0

    def _inside(self, op: Op, plan: Strategy, mesh: Mapping[str, int]) -> Inside | None:
        """What a declared operator does on one shard; None of any other."""
        if not declared(op):
            return None
        assert op.rule is not None
        shapes = tuple(
            (
                tuple(n // ways((over,), mesh) for n, over in zip(v.aval.shape, plan.spec(dims), strict=True)),
                v.aval.dtype,
            )
            for v, dims in zip(op.eqn.invars, op.rule.operands, strict=True)
        )
        return inside(op.eqn.params["fn"], shapes, fuses_operands=self.target.platform == "tpu")

    def _memory_us(self, g: Group, mesh: Mapping[str, int], memory: Sequence[Spec], where: Mapping[int, Spec]) -> float:
        """The time that a kernel's reads and writes take; `where` says where values are that are not at home."""
        if g.kernel is None:
            return 0.0
        avals, total, room = self.axes.program.avals, 0.0, self.target.chip.on_chip_bytes * ON_CHIP_SHARE
        for v, spec in zip((*g.kernel.reads, *g.kernel.writes), memory, strict=True):
            size = nbytes(avals[v]) / ways(where.get(v, spec), mesh) * self.fusion.narrow.get(v, 1.0)
            total += 0.0 if v in self.fusion.near and size <= room else size
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
            local = nbytes(self.axes.program.avals[v]) / ways(spec, mesh)
            own = {c for dim in self.axes.of_value[v] for c in dim}
            for axis, cls in self._class_of_axis(mesh, v, spec).items():
                n, to = mesh[axis], after.get(axis)
                if to != cls and cls in own:
                    kind = "all-to-all" if to in own else "all-gather"
                    moves.append(Move(kind, (axis,), i, local, local * sent(kind, n)))
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

    def _state_moves(self, layout: Layout) -> list[Collective]:
        found = []
        for move in regathers(layout, [source for source, _ in self.state]):
            local = move.wire_bytes / sent("all-gather", layout.ways(move.axes))
            line = f"parameters, {move.when}"
            found.append(
                collective(self.target.lay(layout.mesh), "all-gather", move.axes, local, 1.0, line, ahead=True)
            )
        return found


def collective(
    laying: Laying,
    asked: ReshardKind,
    axes: tuple[str, ...],
    local_bytes: float,
    count: float,
    line: str,
    ahead: bool = False,
) -> Collective:
    """A collective as XLA does it where its axes lie."""
    kind, local = laying.topology.compiled(asked, laying.over(axes), local_bytes)
    wire = sent(kind, math.prod(p.size for p in laying.over(axes))) * local
    time = laying.time_us(kind, axes, local) * count
    return Collective(kind, axes, asked, local_bytes, wire, count, time, line, ahead)


def summed(compute_us: float, collectives: Sequence[Collective], hides: Sequence[str]) -> StepCost:
    """The cost of a step from its parts; `hides` are the kinds of collectives that run beside compute."""
    comm = sum(c.time_us for c in collectives)
    hidden = sum(c.time_us for c in collectives if c.ahead and c.kind in hides)
    step = compute_us + comm - min(hidden, HIDING * compute_us)
    return StepCost(step, compute_us, comm, sum(c.wire_bytes * c.count for c in collectives), tuple(collectives))


def relaid(cost: StepCost, laying: Laying, hides: Sequence[str]) -> StepCost:
    """The same step with its mesh axes laid onto other devices."""
    again = [collective(laying, c.asked, c.axes, c.local_bytes, c.count, c.line, c.ahead) for c in cost.collectives]
    return replace(summed(cost.compute_us, again, hides), waiting=cost.waiting)


def best_laying(target: Target, mesh: Mapping[str, int], cost: StepCost) -> tuple[Laying, StepCost]:
    """Where to lay the axes of a mesh so that a step's traffic takes the least time; ties go to the plainest.

    The axes are given their places in the order of their traffic, the heaviest first or last, and in mesh order.
    """
    heavy: dict[str, float] = dict.fromkeys(mesh, 0.0)
    for c in cost.collectives:
        for a in c.axes:
            heavy[a] += c.wire_bytes * c.count
    by_traffic = sorted(mesh, key=lambda a: -heavy[a])
    orders = dict.fromkeys([tuple(reversed(list(mesh))), tuple(by_traffic), tuple(mesh)])
    best: tuple[Laying, StepCost] | None = None
    for first in orders:
        for laying in islice(layings(target.topology, mesh, first), MOST_LAYINGS):
            now = relaid(cost, laying, target.chip.hides)
            if best is None or now.step_time_us < best[1].step_time_us * (1 - 1e-9):
                best = laying, now
    assert best is not None
    return best


def _nameless(
    specs: Sequence[Spec], mesh: Mapping[str, int]
) -> tuple[dict[str, tuple[str, ...]], dict[str, int], tuple[Spec, ...]]:
    """Specs with mesh axes numbered in mesh order, those that always stand one behind the other as one.

    Returns:
        number -> the axes that it stands for; number -> size; the specs.
    """
    after: dict[str, str | None] = {}
    before: dict[str, str | None] = {}
    for spec in specs:
        for dim in spec:
            previous = None
            for axis in dim:
                if before.setdefault(axis, previous) != previous:
                    before[axis] = None
                if previous is not None and after.setdefault(previous, axis) != axis:
                    after[previous] = None
                previous = axis
            if previous is not None and after.setdefault(previous, None) is not None:
                after[previous] = None
    head: dict[str, str] = {}
    chains: dict[str, list[str]] = {}
    for axis in mesh:  # an axis that follows another in every spec stands later in the mesh, too
        if axis in before:
            leader = before[axis]
            joined = leader in head and after.get(leader) == axis
            head[axis] = head[leader] if joined and leader is not None else axis
            chains.setdefault(head[axis], []).append(axis)
    number = {axis: str(i) for i, axis in enumerate(chains)}
    return (
        {number[axis]: tuple(chain) for axis, chain in chains.items()},
        {number[axis]: math.prod(mesh[a] for a in chain) for axis, chain in chains.items()},
        tuple(tuple(tuple(number[a] for a in dim if a in number) for dim in spec) for spec in specs),
    )


def filled(rule: Rule, plan: Strategy, mesh: Mapping[str, int], tile: int) -> float:
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


def group(axes: LogicalAxes, roles: Roles, fusion: Fusion) -> list[Group]:
    """The operators of a program, those that no layout can tell apart counted together."""
    groups: dict[Any, Group] = {}
    held, inputs, avals = axes.held, set(axes.program.inputs), axes.program.avals

    def place(v: int) -> Any:
        """What a layout tells values apart by."""
        return (
            None if v < 0 else (axes.of_value[v], v in roles.gradients, axes.of_value[held[v]] if v in held else None)
        )

    for op, block in in_loops(axes.program.block):
        if op.rule is None:
            continue
        kernel = fusion.kernels.get(id(op))
        values = tuple(place(v) for v in (*op.operands, *op.results))
        memory: Any = None
        if kernel is not None:
            values_there = (*kernel.reads, *kernel.writes)
            memory = Counter((place(v), itemsize(avals[v]), v in inputs, v in fusion.near) for v in values_there)
            memory = frozenset(memory.items())
        key = (op.name, id(op.rule), values, memory, tuple(v in inputs for v in op.operands[:3]))
        g = groups.setdefault(key, Group(op, kernel, 0.0, [{} for _ in op.operands]))
        g.runs += op.trips
        g.members.append(id(op))
        for takers, v in zip(g.takers, op.operands, strict=True):
            takers.setdefault((held.get(v, v), block), []).append(id(op))
    return [g for g in groups.values() if _costs(g, axes, roles)]


def _costs(g: Group, axes: LogicalAxes, roles: Roles) -> bool:
    """Whether any layout has to pay for an operator: it is a kernel, decides, or passes activations on."""
    if g.kernel is not None or decides(g.op):
        return True
    return any(roles.batch in dim for v in g.op.results for dim in axes.of_value[v])


def in_loops(block: Block, number: int = 0, counter: Iterator[int] | None = None) -> Iterator[tuple[Op, int]]:
    """Every operator, in the order of `Program.ops`, with the number of the loop, branch or remat that it stands in."""
    counter = count(1) if counter is None else counter
    for op in block.ops:
        yield op, number
        for inner in op.blocks:
            own = op.name.startswith("remat") or op.results != inner.outputs
            yield from in_loops(inner, next(counter) if own else number, counter)
