"""The walks over a program that place every value.

Three of them make a propagation:

1. What is open (arguments that the caller left to choose, constants, results with dimensions of their own: iota,
   broadcasts, random bits) learns from those that use it, forwards through the program and backwards from its
   results, until nothing more is learnt.
2. One walk forwards with all of that known finds which partials some operator needs whole; in the next they are made
   whole before their first use, so that none is reduced twice, and every reshard is recorded.
3. Results are taken to where they are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from autoshard import _compat
from autoshard.spmdrules import control
from autoshard.spmdrules.brought import mapped_specs
from autoshard.spmdrules.learn import Learnt, find_open
from autoshard.spmdrules.place import (
    Place,
    ReshardKind,
    Spec,
    axes_of,
    bytes_of,
    extend,
    from_partition_spec,
    replicated_place,
    steps,
    to_partition_spec,
)
from autoshard.spmdrules.program import Block, Op, Program
from autoshard.spmdrules.rule import POSITIONS
from autoshard.spmdrules.settle import Operand, Settled, settle

_ROUNDS = 4
_CONSTRAINTS = ("sharding_constraint", "reshard")


@dataclass(frozen=True)
class Reshard:
    """One collective (or free slice) that the rules ask for.

    Attributes:
        operator: the operator that asks, `output` for the function's results.
        operand: which of its operands; of a loop's or branch's own results `-1 - number`; of `output` the leaf.
        from_spec: where the array is; what it is partial over is not said here.
        to_spec: where it goes.
        kind: what kind of collective; `slice` is free.
        axis: the mesh axis that it runs over.
        bytes_moved: bytes that each device sends, each time.
        times: how often it runs.
        source: the user's line.
    """

    operator: str
    operand: int
    from_spec: PartitionSpec
    to_spec: PartitionSpec
    kind: ReshardKind
    axis: str
    bytes_moved: float
    times: float
    source: str

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        often = f" x {self.times:g}" if self.times != 1 else ""
        return (
            f"{self.operator} operand {self.operand}: {self.from_spec} -> {self.to_spec}, {self.kind} over "
            f"'{self.axis}', {self.bytes_moved:.0f} bytes{often}{where}"
        )


@dataclass(eq=False)
class Walk:
    """The walks over one program.

    Attributes:
        program: the program.
        mesh: mesh axis -> size.
        inputs: where its arguments are.
        chosen: the arguments that may be anywhere.
        reshards: what has been recorded.
        recording: whether this walk is the one that counts; others only look where things end.
        zeros: values that are all zeros, and so partial sums over anything.
    """

    program: Program
    mesh: dict[str, int]
    inputs: Sequence[Place]
    chosen: set[int]
    reshards: list[Reshard] = field(default_factory=list)
    recording: bool = False
    zeros: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places: list[Place | None] = [None] * len(self.program.avals)
        self.nbytes = [bytes_of(a) for a in self.program.avals]
        self.learnt = Learnt(find_open(self.program, self.chosen))
        # Where users want values that are decided already: a partial on its way there is reduced to shards.
        self._hints = Learnt(set(range(len(self.places))) - self.learnt.open)
        self.learning = False
        self._uses: dict[int, set[Spec]] = {v: set() for v in self.program.inputs}
        self._made: set[tuple[int, Place]] = set()  # copies that an earlier reshard has made
        self._settled: dict[Any, Settled] = {}
        self._whole: dict[int, Place] = {}  # partials that some use needs whole, and where they are then
        self._callers: list[Any] = []  # the equations that hold the block being walked

    def run(self, goals: Sequence[Spec | None]) -> list[Place]:
        """All walks.

        Args:
            goals: where the results are wanted, None where nothing says so.

        Returns:
            Where the results are.
        """
        self.learn(goals)
        self._whole.clear()
        self.start()
        self.forward(self.program.block)
        self.recording = True
        self.start()
        self.forward(self.program.block)
        return [self.output(k, v, goal) for k, (v, goal) in enumerate(zip(self.program.outputs, goals, strict=True))]

    def learn(self, goals: Sequence[Spec | None]) -> None:
        """Lets open values learn, until nothing more is learnt."""
        self.learning = True
        for _ in range(_ROUNDS):
            self.learnt.changed = self._hints.changed = False
            self.start()
            self.forward(self.program.block)
            for v, goal in zip(self.program.outputs, goals, strict=True):
                if goal is not None:
                    self.learnt.add(v, self.place(v), goal)
                    self._hints.add(v, self.place(v).whole, goal)
            self.backward(self.program.block)
            if not self.learnt.changed and not self._hints.changed:
                break
        self.learning = False

    def start(self) -> None:
        """Puts the arguments where they are given or learnt."""
        self.places = [None] * len(self.program.avals)
        for v, place in zip(self.program.inputs, self.inputs, strict=True):
            self.places[v] = Place(self.learnt.specs.get(v, place.spec), place.partial)

    def forward(self, block: Block) -> None:
        """Places every value of a block, in order."""
        for op in block.ops:
            if op.rule is not None:
                self.apply(op)
                continue
            self._callers.append(op.eqn)
            if op.name in ("scan", "while"):
                control.loop(self, op)
            elif op.name == "cond":
                control.branches(self, op)
            else:
                self.enter(op, op.blocks[0])
                self.forward(op.blocks[0])
            self._callers.pop()

    def enter(self, op: Op, block: Block, first: int = 0) -> None:
        """Notes which literals among the operands from `first` on are zeros: inside a block they are values.

        Args:
            op: the operator.
            block: one of its blocks, whose inputs start with these operands.
            first: the number of the operand that is the block's first input.
        """
        for i, inner in enumerate(block.inputs, first):
            if i < len(op.operands) and op.operands[i] < 0:
                self.mark_zero(inner, self.is_zero(op, i))

    def backward(self, block: Block) -> None:
        """Lets open values learn from what uses them, in reverse order."""
        for op in reversed(block.ops):
            if op.rule is not None:
                self.learn_operands(op, self.settle(op))
                continue
            self.tie(op)
            for inner in reversed(op.blocks):
                self.backward(inner)
            self.tie(op)

    def learn_operands(self, op: Op, settled: Settled) -> None:
        """Lets the open operands of an operator follow what it takes."""
        for value, target in zip(op.operands, settled.operands, strict=True):
            if value in self.learnt.open:
                self.learnt.add(value, self.place(value), target.spec)
            elif value >= 0:
                self._hints.add(value, self.place(value).whole, target.spec)

    def tie(self, op: Op) -> None:
        """Lets what a loop or branch joins learn from each other."""
        for tie in op.ties:
            head: Spec = ((),) if tie.stacked else ()
            outer, inner = self.learnt.specs.get(tie.outer), self.learnt.specs.get(tie.inner)
            if outer is not None:
                self.learnt.add(tie.inner, self.place(tie.inner), outer[len(head) :])
            if inner is not None:
                self.learnt.add(tie.outer, self.place(tie.outer), head + inner)

    def place(self, value: int) -> Place:
        """Where a value is now."""
        if value < 0:
            return Place(())
        found = self.places[value]
        if found is None:  # a constant
            here = replicated_place(len(self.program.avals[value].shape))
            found = self.places[value] = Place(self.learnt.specs.get(value, here.spec))
        return found

    def settle(self, op: Op) -> Settled:
        """How an operator is cut."""
        assert op.rule is not None
        pinned = self.constraint(op)
        if pinned is not None:
            return Settled((Place(pinned),), (Place(pinned),))
        mapped = mapped_specs(op.eqn, self.mesh)
        if mapped is not None:
            taken, given = mapped
            return Settled(tuple(map(Place, taken)), tuple(map(Place, given)))
        places = tuple(map(self.place, op.operands))
        zero = tuple(self.is_zero(op, i) for i in range(len(op.operands)))
        hints = self._hints.specs if any(place.partial for place in places) else {}
        wanted = tuple(self.learnt.specs.get(r, hints.get(r)) for r in op.results)
        twins = tuple(op.operands.index(v) for v in op.operands)
        key = (id(op.rule), places, zero, twins, wanted)
        found = self._settled.get(key)
        if found is None:
            sizes = [0.0 if v < 0 else self.nbytes[v] for v in op.operands]
            operands = [Operand(*each) for each in zip(places, sizes, zero, twins, strict=True)]
            found = settle(op.rule, operands, [self.nbytes[r] for r in op.results], wanted, self.mesh)
            self._settled[key] = found
        return found

    def constraint(self, op: Op) -> Spec | None:
        """The spec that the user's own constraint gives a value, if it speaks of this mesh."""
        if op.name not in _CONSTRAINTS:
            return None
        spec = getattr(op.eqn.params.get("sharding", op.eqn.params.get("dst_sharding")), "spec", None)
        if spec is None:
            return None
        here = self.place(op.operands[0])
        said = from_partition_spec(spec, len(here.spec))
        taken = set(axes_of(said))
        if not taken <= self.mesh.keys():
            return None
        free = {d for d, entry in enumerate(tuple(spec)) if entry is PartitionSpec.UNCONSTRAINED}
        free |= set(op.eqn.params.get("unconstrained_dims") or ())
        return tuple(
            tuple(a for a in now if a not in taken) if d in free else dim
            for d, (dim, now) in enumerate(zip(said, here.spec, strict=True))
        )

    def is_zero(self, op: Op, operand: int) -> bool:
        """Whether an operand is all zeros."""
        if op.operands[operand] >= 0:
            return op.operands[operand] in self.zeros
        value = getattr(op.eqn.invars[operand], "val", None)
        return value is not None and getattr(value, "shape", ()) == () and bool(value == 0)

    def mark_zero(self, value: int, zero: bool) -> None:
        """Notes whether a value is all zeros."""
        (self.zeros.add if zero else self.zeros.discard)(value)

    def apply(self, op: Op) -> Settled:
        """Takes the operands where an operator needs them, and places its results; says how it is cut."""
        if not self.learning:
            self.make_whole(op)
        settled = self.settle(op)
        assert op.rule is not None
        if self.learning:
            self.learn_operands(op, settled)
        for i, (value, target) in enumerate(zip(op.operands, settled.operands, strict=True)):
            self.move(op, i, value, target)
        moved = op.rule.moves
        zero = bool(moved) and all(self.is_zero(op, i) for i in moved)
        for j, (result, place) in enumerate(zip(op.results, settled.results, strict=True)):
            self.places[result] = place
            self.mark_zero(result, zero)
            lasting = tuple((a, how) for a, how in place.partial if how not in POSITIONS)
            if lasting != place.partial:  # positions mean nothing without their values: decided at once
                self.move(op, -1 - j, result, Place(place.spec, lasting))
        return settled

    def make_whole(self, op: Op) -> None:
        """Makes those operands whole now that some later operator needs whole."""
        for i, value in enumerate(op.operands):
            later = self._whole.get(value)
            if later is not None and set(later.partial) < set(self.place(value).partial):
                self.move(op, i, value, later)

    def move(self, op: Op, operand: int, value: int, target: Place, times: float | None = None) -> None:
        """Takes a value to where it is needed, and records what that moves.

        Args:
            op: the operator that needs it.
            operand: which of its operands, or `-1 - number` of its results.
            value: the value.
            target: where it is needed; partial over no axis over which it is not.
            times: how often, by default as often as the operator runs.
        """
        if value < 0:
            return
        if self.recording and value in self._uses:
            self._uses[value].add(target.spec)
        place = self.place(value)
        if place == target:
            return
        if self.recording and (value, target) not in self._made:
            self._made.add((value, target))
            self.record(op.name, operand, value, target, op.trips if times is None else times, op.eqn)
        if set(place.partial) - set(target.partial):  # made whole once, it is whole for all later uses
            home = Place(extend(Place(place.spec, target.partial), target.spec), target.partial)
            self.places[value] = self._whole[value] = home

    @contextmanager
    def apart(self, values: Sequence[int]) -> Iterator[None]:
        """What happens to `values` in here may not happen: after it they are where they were, nothing made of them."""
        before = {v: self.place(v) for v in values}
        made, whole = {m for m in self._made if m[0] in before}, {v: self._whole.get(v) for v in values}
        yield
        for v, here in before.items():
            self.places[v] = here
        self._made = {m for m in self._made if m[0] not in before} | made
        for v, place in whole.items():
            if place is None:
                self._whole.pop(v, None)
            else:
                self._whole[v] = place

    def record(self, name: str, operand: int, value: int, target: Place, times: float, eqn: Any) -> None:
        """Notes every step that takes a value to `target`."""
        place = self.place(value)
        found = steps(place, target, self.nbytes[value], self.mesh)
        if not found:
            return
        source = self.source(eqn)
        specs = to_partition_spec(place.spec), to_partition_spec(target.spec)
        for step in found:
            self.reshards.append(Reshard(name, operand, *specs, step.kind, step.axis, step.nbytes, times, source))

    def source(self, eqn: Any) -> str:
        """The user's line of an equation; inside library code, the line that called it."""
        if eqn is None:
            return ""
        return next(filter(None, map(_compat.source_line, (eqn, *reversed(self._callers)))), "")

    def output(self, number: int, value: int, goal: Spec | None) -> Place:
        """Takes a result of the function where it is wanted."""
        target = self.place(value) if goal is None else Place(goal)
        if value in self._uses:
            self._uses[value].add(target.spec)
        self.record("output", number, value, target, 1.0, None)
        return target

    def corrected(self, value: int) -> Spec:
        """The spec of an argument: what all of its uses want, else where it is."""
        found = self._uses[value]
        if len(found) == 1:
            return next(iter(found))
        return self.learnt.specs.get(value, self.inputs[self.program.inputs.index(value)].spec)
