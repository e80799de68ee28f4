"""The memory of an opaque operator: what it reads, writes and holds on one shard.

The function of a declared operator is traced with the shapes of a shard, and its operators are grouped into kernels
(`fusion`), like those of the program around it. The operator holds the results of its kernels, except those that it
returns. Operators inside it that declare a cost have that cost. Grouped products also write, read and hold
their masked copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.cost.constants import MEMORY_CACHE_ENTRIES
from autoshard.sharding.cost.fusion import Fusion, fuse
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.flops import Shapes, inner_program, masked_groups
from autoshard.sharding.program.operator_kinds import is_declared
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost, declared_costs
from autoshard.spmdrules.custom_ops.opaque_primitive import one_of_batch
from autoshard.spmdrules.ir.program import Block, Op, Program, inlined


@shown
@dataclass(frozen=True)
class OpaqueMemory:
    """What an operator moves and holds in one run.

    Attributes:
        moved_bytes: bytes that it reads and writes, except those of `costs`.
        peak_bytes: peak bytes of its own values.
        costs: the costs of the operators inside it that declare one.
    """

    moved_bytes: float
    peak_bytes: float
    costs: tuple[KernelCost, ...] = ()


@functools.lru_cache(maxsize=MEMORY_CACHE_ENTRIES)
def trace_opaque_memory(fn: Callable[..., Any], operands: Shapes, platform: str) -> OpaqueMemory | None:
    """Return the memory of a function on operands of these shapes and dtypes; None if it does not accept them."""
    once = one_of_batch(fn, operands)
    if once is not None:  # such as the one stage of a pipeline that a device has
        return trace_opaque_memory(*once, platform)
    program = inner_program(fn, operands)
    if program is None:
        return None
    fusion = fuse(program, platform == "tpu", platform == "cuda")
    costs = {key: _declared(k.op) for key, k in fusion.kernels.items()}
    moved = sum(
        k.op.trips * (_bytes(program, fusion, (*k.reads, *k.writes)) + 2 * _masked(k.op, platform))
        for key, k in fusion.kernels.items()
        if not costs[key]
    )
    declared = (cost.times(fusion.kernels[key].op.trips) for key, found in costs.items() for cost in found)
    return OpaqueMemory(moved, _peak(program, fusion, program.block, platform), tuple(declared))


def _declared(op: Op) -> tuple[KernelCost, ...]:
    return declared_costs(op.eqn, [v.aval for v in op.eqn.invars]) if is_declared(op) else ()


def _masked(op: Op, platform: str) -> float:
    groups, operands = masked_groups(op, platform)
    return float(groups * sum(nbytes(v.aval) for v in op.eqn.invars[:operands]))


def _bytes(program: Program, fusion: Fusion, values: Iterable[int]) -> float:
    return sum(nbytes(program.avals[v]) * fusion.narrow.get(v, 1.0) for v in values)


def _peak(program: Program, fusion: Fusion, block: Block, platform: str) -> float:
    """Return the peak bytes of the values that a block makes and does not return."""
    ops, last = list(inlined(block)), {}
    for number, op in enumerate(ops):
        last |= dict.fromkeys(op.operands, number)
    for op in reversed(ops):  # a value that is computed inside its users keeps its operands alive until then
        if not op.blocks and not any(v in fusion.written for v in op.results):
            end = max(last.get(v, -1) for v in op.results)
            last |= {v: max(last[v], end) for v in op.operands}
    not_own = {*block.inputs, *program.outputs}
    live: set[int] = set()
    peak = 0.0
    for number, op in enumerate(ops):
        live |= {v for v in op.results if v in fusion.written} - not_own
        inside = (_peak(program, fusion, inner, platform) for inner in op.blocks)
        held = (cost.held_bytes for cost in _declared(op))
        nested = max((_masked(op, platform), *inside, *held))
        peak = max(peak, _bytes(program, fusion, live) + nested)
        live = {v for v in live if last.get(v, -1) > number or v in block.outputs}
    return peak
