"""What an operator that its author declared does inside, on one shard: the memory that it reads, writes and holds.

Its function is traced with the shapes of a shard and grouped into kernels (`fusion`), as the program around it is. The
results of its kernels that are no results of its own are what it holds meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autoshard.sharding.cost.fusion import Fusion, fuse
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import Shapes, inner_program
from autoshard.spmdrules.ir.program import Block, Program, inlined


@dataclass(frozen=True)
class OpaqueMemory:
    """Bytes that an operator moves to and from memory in one run, and the most that it holds of its own."""

    moved_bytes: float
    held_bytes: float


@functools.lru_cache(maxsize=512)
def inside(fn: Callable[..., Any], operands: Shapes, fuses_operands: bool) -> OpaqueMemory | None:
    """What a function does on operands of these shapes and types; None where it does not take them."""
    program = inner_program(fn, operands)
    if program is None:
        return None
    fusion = fuse(program, fuses_operands)
    moved = sum(k.op.trips * _bytes(program, fusion, (*k.reads, *k.writes)) for k in fusion.kernels.values())
    return OpaqueMemory(moved, _held(program, fusion, program.block))


def _bytes(program: Program, fusion: Fusion, values: Iterable[int]) -> float:
    return sum(nbytes(program.avals[v]) * fusion.narrow.get(v, 1.0) for v in values)


def _held(program: Program, fusion: Fusion, block: Block) -> float:
    """The most that a block's own values take while it runs."""
    ops, last = list(inlined(block)), {}
    for place, op in enumerate(ops):
        last |= dict.fromkeys(op.operands, place)
    for op in reversed(ops):  # what is computed inside its users holds what it is computed from until then
        if not op.blocks and not any(v in fusion.written for v in op.results):
            end = max(last.get(v, -1) for v in op.results)
            last |= {v: max(last[v], end) for v in op.operands}
    not_own = {*block.inputs, *program.outputs}
    live: set[int] = set()
    most = 0.0
    for place, op in enumerate(ops):
        live |= {v for v in op.results if v in fusion.written} - not_own
        nested = max((_held(program, fusion, inner) for inner in op.blocks), default=0.0)
        most = max(most, _bytes(program, fusion, live) + nested)
        live = {v for v in live if last.get(v, -1) > place or v in block.outputs}
    return most
