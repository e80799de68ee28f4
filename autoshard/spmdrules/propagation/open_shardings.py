"""Shardings that are not decided yet, and are inferred from the operators that use the values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autoshard._shown import shown
from autoshard.spmdrules.core.placement import Spec, extend
from autoshard.spmdrules.ir.program import Block, Op, Program


@shown
@dataclass(eq=False)
class OpenShardings:
    """The specs inferred so far for open values. Inference only adds mesh axes, so it terminates.

    Attributes:
        open: the values whose spec is open.
        specs: the specs inferred so far.
        changed: whether any spec has changed since this was last set to False.
    """

    open: set[int]
    specs: dict[int, Spec] = field(default_factory=dict)
    changed: bool = False

    def add(self, value: int, current: Spec, spec: Spec, partial: Iterable[tuple[str, str]] = ()) -> None:
        """Extends the spec of an open value by the mesh axes of another spec.

        Args:
            value: the value; nothing happens unless it is open.
            current: its current spec, used if none has been inferred yet.
            spec: the spec to extend towards.
            partial: the axes that it is partial over, which are not added.
        """
        before = self.specs.get(value, current)
        if spec == before or value not in self.open:
            return
        after = extend(before, spec, (axis for axis, _ in partial))
        if after != before:
            self.specs[value] = after
            self.changed = True


def find_open(program: Program, open_inputs: set[int]) -> set[int]:
    """Returns the values whose spec is open.

    These are the open inputs, constants, and results with a dimension that no decided operand has.

    Args:
        program: the program.
        open_inputs: inputs whose sharding the caller left open.
    """
    decided = set(program.inputs) - open_inputs

    def visit(block: Block) -> None:
        for op in block.ops:
            if op.rule is not None:
                _mark_decided(op, decided)
                continue
            for edge in op.edges:  # into the blocks
                if edge.outer in decided and edge.outer in op.operands:
                    decided.add(edge.inner)
            for inner in op.blocks:
                visit(inner)
            for edge in op.edges:  # out of the blocks
                if edge.inner in decided and edge.outer in op.results:
                    decided.add(edge.outer)

    visit(program.block)
    return set(range(len(program.avals))) - decided


def _mark_decided(op: Op, decided: set[int]) -> None:
    """Adds each result of an operator to `decided` if decided operands have all of its dimensions."""
    rule = op.rule
    assert rule is not None
    arrays = zip(op.operands, rule.operands, strict=True)
    known = {f for value, dims in arrays if value in decided for dim in dims for f in dim}
    known |= {f.name for f in rule.factors if f.size == 1}
    for value, dims in zip(op.results, rule.results, strict=True):
        if all(f in known for dim in dims for f in dim):
            decided.add(value)
