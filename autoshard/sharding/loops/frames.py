"""Finds the blocks of a program that can be rewritten: the outermost one, and bodies of loops and of `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard import _compat
from autoshard.spmdrules.ir.program import Block

FRAMES = ("scan", "remat2")  # operators in whose bodies the program can be changed


def frames(block: Block, path: tuple[int, ...] = ()) -> Iterator[tuple[Block, tuple[int, ...]]]:
    """Yield a block and the bodies in it that can be changed, each with the path of its frame (`FrameEdits.at`)."""
    yield block, path
    positions = {id(eqn): n for n, eqn in enumerate(_compat.open_jaxpr(block.jaxpr).eqns)}
    for op in block.ops:
        if op.name in FRAMES and id(op.eqn) in positions:
            yield from frames(op.blocks[0], (*path, positions[id(op.eqn)]))
