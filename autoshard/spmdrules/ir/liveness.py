"""Which operators of a program somebody uses."""

from __future__ import annotations

from autoshard.spmdrules.ir.program import CONTROL, Block, Op, Program


def live_ops(program: Program) -> set[Op]:
    """The operators whose results are used, or that have effects; of a loop or branch that is used, all of them.

    Args:
        program: the program.
    """
    live: set[Op] = set()
    _visit(program.block, set(program.outputs), live, False)
    return live


def _visit(block: Block, used: set[int], live: set[Op], everything: bool) -> None:
    for op in reversed(block.ops):
        if not everything and used.isdisjoint(op.results) and not op.eqn.effects:
            continue
        live.add(op)
        loops = op.name in CONTROL
        for inner in op.blocks:
            _visit(inner, used, live, everything or loops)
        if loops or not op.blocks:  # what a call uses, its own operators do
            used.update(op.operands)
