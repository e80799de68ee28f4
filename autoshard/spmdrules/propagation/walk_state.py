"""What a walk knows while it goes: where every value is, what is zero, what is partial, what was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard.spmdrules.core.placement import (
    Placement,
    Spec,
    bytes_of,
    extend,
    replicated_placement,
    steps,
    to_partition_spec,
)
from autoshard.spmdrules.core.reshard import Reshard
from autoshard.spmdrules.ir.program import Block, Op, Program
from autoshard.spmdrules.propagation.open_shardings import OpenShardings, find_open
from autoshard.spmdrules.propagation.resolution_cache import literal_zero


@dataclass(eq=False)
class WalkState:
    """Where a walk over one program stands.

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
    inputs: Sequence[Placement]
    chosen: set[int]
    reshards: list[Reshard] = field(default_factory=list)
    recording: bool = False
    zeros: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places: list[Placement | None] = []
        self.nbytes = [bytes_of(a) for a in self.program.avals]
        self.learnt = OpenShardings(find_open(self.program, self.chosen))
        self.learning = False
        self._uses: dict[int, set[Spec]] = {v: set() for v in self.program.inputs}
        self._made: set[tuple[int, Placement]] = set()  # copies that an earlier reshard has made
        self._whole: dict[int, Placement] = {}  # partials that some use needs whole, and where they are then
        self._callers: list[Any] = []  # the equations that hold the block being walked

    def place(self, value: int) -> Placement:
        """Where a value is now."""
        found = self.places[value]
        if found is None:  # a constant
            here = replicated_placement(len(self.program.avals[value].shape))
            found = self.places[value] = Placement(self.learnt.specs.get(value, here.spec))
        return found

    def is_zero(self, op: Op, operand: int) -> bool:
        """Whether an operand is all zeros."""
        value = op.operands[operand]
        return value in self.zeros if value >= 0 else literal_zero(op.eqn.invars[operand])

    def mark_zero(self, value: int, zero: bool) -> None:
        """Notes whether a value is all zeros."""
        (self.zeros.add if zero else self.zeros.discard)(value)

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

    def move(self, op: Op, operand: int, value: int, target: Placement, times: float | None = None) -> None:
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
            home = Placement(extend(place.spec, target.spec, dict(target.partial)), target.partial)
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

    def record(self, name: str, operand: int, value: int, target: Placement, times: float, eqn: Any) -> None:
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

    def tie(self, op: Op) -> None:
        """Lets what a loop or branch joins learn from each other."""
        for tie in op.ties:
            head: Spec = ((),) if tie.stacked else ()
            outer, inner = self.learnt.specs.get(tie.outer), self.learnt.specs.get(tie.inner)
            if outer is not None:
                here = self.place(tie.inner)
                self.learnt.add(tie.inner, here.spec, outer[len(head) :], here.partial)
            if inner is not None:
                here = self.place(tie.outer)
                self.learnt.add(tie.outer, here.spec, head + inner, here.partial)
