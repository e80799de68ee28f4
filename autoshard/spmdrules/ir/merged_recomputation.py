"""Finds recomputations of `jax.checkpoint(prevent_cse=False)` that XLA merges with the forward pass.

Nothing keeps XLA from merging such a recomputation with the equal operators of the forward pass (common subexpression
elimination), where both are in the main program or in the body of one loop, such as a loop over microbatches. Their
results are then kept, as without `jax.checkpoint`, and nothing is computed or gathered again. In a loop over layers the
forward and the backward pass are different loops, so nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from autoshard import _compat
from autoshard.spmdrules.ir.program import Block, Op, Program

_BARRIERS = ("optimization_barrier",)
_of_program: WeakKeyDictionary[Program, dict[int, int]] = WeakKeyDictionary()  # the values that were found before


def merged_values(program: Program) -> Mapping[int, int]:
    """Return the values that equal an earlier one and are merged with it: value -> the earlier one.

    They are found only in blocks that have a `jax.checkpoint(prevent_cse=False)`.
    """
    merged = _of_program.get(program)
    if merged is None:
        merged = _of_program[program] = {}
        for block in _bodies(program.block):
            if any(is_merged_checkpoint(op) for op in _calls(block)):
                _merge(block, merged)
    return merged


def is_merged_checkpoint(op: Op) -> bool:
    """Whether an operator is a `jax.checkpoint` that XLA may merge with the forward pass."""
    return op.name == "remat2" and not op.eqn.params["prevent_cse"]


def _bodies(block: Block) -> Iterator[Block]:
    """Yield a block and the bodies of its loops and branches, each of which XLA compiles as one computation."""
    yield block
    for op in _operators(block, protected=True):
        for inner in op.blocks:
            yield from _bodies(inner)


def _merge(block: Block, merged: dict[int, int]) -> None:
    """Add the values of one block that equal an earlier one to `merged`."""
    first: dict[Any, tuple[int, ...]] = {}
    literals = _literal_inputs(block)
    for op in _operators(block):
        if op.rule is None or op.blocks or op.name in _BARRIERS:
            continue
        operands = tuple(
            _text(atom) if isinstance(atom, _compat.Literal) else literals.get(v, merged.get(v, v))
            for v, atom in zip(op.operands, op.eqn.invars, strict=True)
        )
        types = tuple(str(v.aval) for v in op.eqn.outvars)
        earlier = first.setdefault((op.name, str(op.eqn.params), operands, types), op.results)
        if earlier is not op.results:
            merged.update(zip(op.results, earlier, strict=True))


def _literal_inputs(block: Block) -> dict[int, str]:
    """Return the literal that each input of a call stands for, such as the -inf of a masked softmax."""
    found: dict[int, str] = {}
    for op in _calls(block):
        for v, atom in zip(op.blocks[0].inputs, op.eqn.invars, strict=True):
            if isinstance(atom, _compat.Literal):
                found[v] = _text(atom)
    return found


def _text(literal: Any) -> str:
    return f"{literal.val!r}: {literal.aval.dtype}"


def _calls(block: Block) -> Iterator[Op]:
    for op in block.ops:
        if len(op.blocks) == 1 and op.results == op.blocks[0].outputs:
            yield op
            yield from _calls(op.blocks[0])


def _operators(block: Block, *, protected: bool = False) -> Iterator[Op]:
    """Yield the operators of a block and of its calls; those of protected recomputations only if `protected`."""
    for op in block.ops:
        if len(op.blocks) != 1 or op.results != op.blocks[0].outputs:
            yield op
        elif protected or op.name != "remat2" or is_merged_checkpoint(op):
            yield from _operators(op.blocks[0], protected=protected)
