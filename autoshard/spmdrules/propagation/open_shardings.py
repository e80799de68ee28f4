"""What nobody has decided yet: values that may still be sharded as those that use them want them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autoshard.spmdrules.core.placement import Spec, extend
from autoshard.spmdrules.ir.program import Block, Op, Program


@dataclass(eq=False)
class OpenShardings:
    """What open values have learnt so far. Learning only adds mesh axes, so it ends.

    Attributes:
        open: the values that may learn.
        specs: what they have learnt.
        changed: whether anything was learnt since this was last set to False.
    """

    open: set[int]
    specs: dict[int, Spec] = field(default_factory=dict)
    changed: bool = False

    def add(self, value: int, here: Spec, spec: Spec, partial: Iterable[tuple[str, str]] = ()) -> None:
        """Adds the mesh axes of `spec` to a value that is at `here` and maybe partial, if it is open."""
        before = self.specs.get(value, here)
        if spec == before or value not in self.open:
            return
        after = extend(before, spec, (axis for axis, _ in partial))
        if after != before:
            self.specs[value] = after
            self.changed = True


def find_open(program: Program, chosen: set[int]) -> set[int]:
    """Values that may learn: `chosen` inputs, constants, and results with a dimension that no decided operand has.

    Args:
        program: the program.
        chosen: inputs that the caller left open.
    """
    decided = set(program.inputs) - chosen

    def visit(block: Block) -> None:
        for op in block.ops:
            if op.rule is not None:
                _mark_decided(op, decided)
                continue
            for tie in op.ties:  # what enters
                if tie.outer in decided and tie.outer in op.operands:
                    decided.add(tie.inner)
            for inner in op.blocks:
                visit(inner)
            for tie in op.ties:  # what leaves
                if tie.inner in decided and tie.outer in op.results:
                    decided.add(tie.outer)

    visit(program.block)
    return set(range(len(program.avals))) - decided


def _mark_decided(op: Op, decided: set[int]) -> None:
    rule = op.rule
    assert rule is not None
    arrays = zip(op.operands, rule.operands, strict=True)
    known = {f for value, dims in arrays if value in decided for dim in dims for f in dim}
    known |= {f.name for f in rule.factors if f.size == 1}
    for value, dims in zip(op.results, rule.results, strict=True):
        if all(f in known for dim in dims for f in dim):
            decided.add(value)
