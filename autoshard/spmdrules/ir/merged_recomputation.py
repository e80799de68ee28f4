"""Finds what `jax.checkpoint(prevent_cse=False)` recomputes in vain.

Outside of loops, nothing keeps XLA from merging such a recomputation with the equal operators of the forward pass
(common subexpression elimination). Their results are then kept, as without `jax.checkpoint`. In a loop over layers the
forward and the backward pass are different loops, so nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard import _compat
from autoshard.spmdrules.ir.program import Block, Op, Program

_BARRIERS = ("optimization_barrier",)


def merged_values(program: Program) -> dict[int, int]:
    """Return the values that equal an earlier one and are merged with it: value -> the earlier one.

    They are found only if the program has a `jax.checkpoint(prevent_cse=False)` outside of loops.
    """
    if not any(_is_unprotected(op) for op in _calls(program.block)):
        return {}
    first: dict[Any, tuple[int, ...]] = {}
    merged: dict[int, int] = {}
    for op in _operators(program.block):
        if op.rule is None or op.blocks or op.name in _BARRIERS:
            continue
        operands = tuple(
            repr(atom.val) if isinstance(atom, _compat.Literal) else merged.get(v, v)
            for v, atom in zip(op.operands, op.eqn.invars, strict=True)
        )
        types = tuple(str(v.aval) for v in op.eqn.outvars)
        earlier = first.setdefault((op.name, str(op.eqn.params), operands, types), op.results)
        if earlier is not op.results:
            merged.update(zip(op.results, earlier, strict=True))
    return merged


def _calls(block: Block) -> Iterator[Op]:
    for op in block.ops:
        if len(op.blocks) == 1 and op.results == op.blocks[0].outputs:
            yield op
            yield from _calls(op.blocks[0])


def _is_unprotected(op: Op) -> bool:
    return op.name == "remat2" and not op.eqn.params["prevent_cse"]


def _operators(block: Block) -> Iterator[Op]:
    """Yield the operators of a block and of its calls, except those of protected recomputations."""
    for op in block.ops:
        if len(op.blocks) != 1 or op.results != op.blocks[0].outputs:
            yield op
        elif op.name != "remat2" or _is_unprotected(op):
            yield from _operators(op.blocks[0])
