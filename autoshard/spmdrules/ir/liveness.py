"""Finds the operators of a program whose results are used."""

from __future__ import annotations

from autoshard.spmdrules.ir.program import CONTROL, Block, Op, Program


def live_ops(program: Program) -> set[Op]:
    """Returns the operators whose results are used, or that have effects.

    Every operator inside a live loop or branch counts as live.
    """
    live: set[Op] = set()
    _visit(program.block, set(program.outputs), live, False)
    return live


def _visit(block: Block, used: set[int], live: set[Op], everything: bool) -> None:
    for op in reversed(block.ops):
        if not everything and used.isdisjoint(op.results) and not op.eqn.effects:
            continue
        live.add(op)
        is_control = op.name in CONTROL
        for inner in op.blocks:
            _visit(inner, used, live, everything or is_control)
        if is_control or not op.blocks:  # a call uses only the operands that its operators use
            used.update(op.operands)
