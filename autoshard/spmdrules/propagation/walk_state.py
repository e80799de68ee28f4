"""The state of a walk: the placement of every value, which values are zero, and the recorded reshards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autoshard import _compat
from autoshard._shown import shown
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


@shown
@dataclass(eq=False)
class WalkState:
    """The state of a walk over one program.

    Attributes:
        program: the program.
        mesh: mesh axis -> size.
        inputs: the placements of its inputs.
        open_inputs: the inputs whose sharding the walk may choose.
        reshards: the reshards recorded so far.
        recording: whether this walk records reshards; earlier walks only find placements.
        zeros: values whose elements are all zero; such a value is a partial sum over any axis.
    """

    program: Program
    mesh: dict[str, int]
    inputs: Sequence[Placement]
    open_inputs: set[int]
    reshards: list[Reshard] = field(default_factory=list)
    recording: bool = False
    zeros: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.placements: list[Placement | None] = []
        self.nbytes = [bytes_of(a) for a in self.program.avals]
        self.inferred = OpenShardings(find_open(self.program, self.open_inputs))
        self.inferring = False
        self._uses: dict[int, set[Spec]] = {v: set() for v in self.program.inputs}  # the specs that uses need
        self._recorded: set[tuple[int, Placement]] = (
            set()
        )  # (value, target) of every recorded move: later uses share it
        self._reduced: dict[int, Placement] = {}  # partials that some use reduces, and their placement after that
        self._callers: list[Any] = []  # the equations that hold the block being walked

    def placement(self, value: int) -> Placement:
        """The current placement of a value."""
        found = self.placements[value]
        if found is None:  # a constant
            replicated = replicated_placement(len(self.program.avals[value].shape))
            found = self.placements[value] = Placement(self.inferred.specs.get(value, replicated.spec))
        return found

    def is_zero(self, op: Op, operand: int) -> bool:
        """Whether all elements of an operand are zero."""
        value = op.operands[operand]
        return value in self.zeros if value >= 0 else literal_zero(op.eqn.invars[operand])

    def mark_zero(self, value: int, zero: bool) -> None:
        """Records whether all elements of a value are zero."""
        (self.zeros.add if zero else self.zeros.discard)(value)

    def enter(self, op: Op, block: Block, first: int = 0) -> None:
        """Records which inputs of a block are literal zeros outside it. Inside the block they are values.

        Args:
            op: the operator.
            block: one of its blocks.
            first: the index of the operand that is the block's first input; later operands are its later inputs.
        """
        for i, inner in enumerate(block.inputs, first):
            if i < len(op.operands) and op.operands[i] < 0:
                self.mark_zero(inner, self.is_zero(op, i))

    def move(self, op: Op, operand: int, value: int, target: Placement, times: float | None = None) -> None:
        """Moves a value to the placement that a use needs, and records what that costs.

        Args:
            op: the operator that uses it.
            operand: which of its operands, or `-1 - number` for one of its results.
            value: the value.
            target: the placement needed; partial only over axes that the value is partial over.
            times: how often it moves. Default: as often as the operator runs.
        """
        if value < 0:
            return
        if self.recording and value in self._uses:
            self._uses[value].add(target.spec)
        place = self.placement(value)
        if place == target:
            return
        if self.recording and (value, target) not in self._recorded:
            self._recorded.add((value, target))
            self.record(op.name, operand, value, target, op.trips if times is None else times, op.eqn)
        if set(place.partial) - set(target.partial):  # once reduced, it stays reduced for all later uses
            after = Placement(extend(place.spec, target.spec, dict(target.partial)), target.partial)
            self.placements[value] = self._reduced[value] = after

    @contextmanager
    def isolated(self, values: Sequence[int]) -> Iterator[None]:
        """Restores the state of `values` at the end, because the code inside may not run (a branch)."""
        before = {v: self.placement(v) for v in values}
        recorded = {m for m in self._recorded if m[0] in before}
        reduced = {v: self._reduced.get(v) for v in values}
        yield
        for v, placement in before.items():
            self.placements[v] = placement
        self._recorded = {m for m in self._recorded if m[0] not in before} | recorded
        for v, place in reduced.items():
            if place is None:
                self._reduced.pop(v, None)
            else:
                self._reduced[v] = place

    def record(self, name: str, operand: int, value: int, target: Placement, times: float, eqn: Any) -> None:
        """Records every step that moves a value to `target`."""
        place = self.placement(value)
        found = steps(place, target, self.nbytes[value], self.mesh)
        if not found:
            return
        source = self.source(eqn)
        specs = to_partition_spec(place.spec), to_partition_spec(target.spec)
        for step in found:
            self.reshards.append(Reshard(name, operand, *specs, step.kind, step.axis, step.nbytes, times, source))

    def source(self, eqn: Any) -> str:
        """The user's line of an equation; for an equation of a library, the line that called the library."""
        if eqn is None:
            return ""
        return next(filter(None, map(_compat.source_line, (eqn, *reversed(self._callers)))), "")

    def infer_across_edges(self, op: Op) -> None:
        """Passes inferred specs between the inner and outer values of a loop or branch."""
        for edge in op.edges:
            head: Spec = ((),) if edge.stacked else ()
            outer, inner = self.inferred.specs.get(edge.outer), self.inferred.specs.get(edge.inner)
            if outer is not None:
                current = self.placement(edge.inner)
                self.inferred.add(edge.inner, current.spec, outer[len(head) :], current.partial)
            if inner is not None:
                current = self.placement(edge.outer)
                self.inferred.add(edge.outer, current.spec, head + inner, current.partial)
