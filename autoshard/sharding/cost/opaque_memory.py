"""The memory of an opaque operator: what it reads, writes and holds on one shard.

The function of a declared operator is traced with the shapes of a shard, and its operators are grouped into kernels
(`fusion`), like those of the program around it. The operator holds the results of its kernels, except those that it
returns. Operators inside it that declare a cost have that cost. Grouped products also write, read and hold
their masked copies.

Operands that are gathered for it, and results that are scattered after it, are not held all at once:

    gathered operand   from the beginning of the operator to the last operator inside that takes it
    scattered result   whole only where it is made: it is scattered before the next one is made

Compiled for tpu7x:2x2x4 (libtpu 0.0.42.1), `fsdp:32`: in the gradients of 256 SwiGLU experts of 7168 x 2048, the three
gathered matrices are held from the beginning, each to its last product, and the three gradients one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
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
        held_bytes: bytes of its own values while each operator inside runs.
        last_uses: for each operand, the last operator inside that needs it; -1 if none does.
        results: for each result, the operator inside that makes it, and the last one that needs it; -1 and -1 if it
            is an operand.
        costs: the costs of the operators inside it that declare one.
    """

    moved_bytes: float
    held_bytes: tuple[float, ...]
    last_uses: tuple[int, ...]
    results: tuple[tuple[int, int], ...]
    costs: tuple[KernelCost, ...] = ()

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of its own values."""
        return max(self.held_bytes, default=0.0)

    def peak_with(self, gathered: Mapping[int, float], scattered: Mapping[int, float]) -> float:
        """Return the peak bytes of its own values, of gathered operands and of results that are scattered after it.

        Args:
            gathered: operand -> bytes.
            scattered: result -> bytes.
        """
        spans = [(0, self.last_uses[operand], size) for operand, size in gathered.items()]
        spans += [(*self.results[result], size) for result, size in scattered.items()]
        held = [
            own + sum(size for first, last, size in spans if first <= number <= last)
            for number, own in enumerate(self.held_bytes)
        ]
        return max(*held, sum(gathered.values()), *scattered.values())


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
    held, last = _held(program, fusion, program.block, platform)
    maker = {v: number for number, op in enumerate(inlined(program.block)) for v in op.results}
    last_uses = tuple([last.get(v, -1) for v in program.block.inputs])
    results = tuple([(maker[v], max(maker[v], last.get(v, -1))) if v in maker else (-1, -1) for v in program.outputs])
    return OpaqueMemory(moved, tuple(held), last_uses, results, tuple(declared))


def _declared(op: Op) -> tuple[KernelCost, ...]:
    return declared_costs(op.eqn, [v.aval for v in op.eqn.invars]) if is_declared(op) else ()


def _masked(op: Op, platform: str) -> float:
    groups, operands = masked_groups(op, platform)
    return float(groups * sum(nbytes(v.aval) for v in op.eqn.invars[:operands]))


def _bytes(program: Program, fusion: Fusion, values: Iterable[int]) -> float:
    return sum(nbytes(program.avals[v]) * fusion.narrow.get(v, 1.0) for v in values)


def _held(program: Program, fusion: Fusion, block: Block, platform: str) -> tuple[list[float], dict[int, int]]:
    """Return the bytes of the values that a block makes and does not return, and where its values are needed last.

    The bytes are those while each operator runs. The places are the numbers of operators.
    """
    ops, last = list(inlined(block)), {}
    for number, op in enumerate(ops):
        last |= dict.fromkeys(op.operands, number)
    for op in reversed(ops):  # a value that is computed inside its users keeps its operands alive until then
        if not op.blocks and not any(v in fusion.written for v in op.results):
            end = max(last.get(v, -1) for v in op.results)
            last |= {v: max(last[v], end) for v in op.operands}
    not_own = {*block.inputs, *program.outputs}
    live: set[int] = set()
    found: list[float] = []
    for number, op in enumerate(ops):
        live |= {v for v in op.results if v in fusion.written} - not_own
        inside = (max(_held(program, fusion, inner, platform)[0], default=0.0) for inner in op.blocks)
        held = (cost.held_bytes for cost in _declared(op))
        nested = max((_masked(op, platform), *inside, *held))
        found.append(_bytes(program, fusion, live) + nested)
        live = {v for v in live if last.get(v, -1) > number or v in block.outputs}
    return found, last
