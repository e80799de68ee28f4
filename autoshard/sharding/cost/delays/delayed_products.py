"""Gradients of weights that XLA:TPU computes late, and the memory that this takes.

If the sequence is sharded outside of attention and of the feed-forward block, the gradient of a weight is a product of
an activation that is gathered and a gradient, or the other way round. XLA:TPU computes such a product at the end of
the loop body. In straight code, it computes it after the loop that follows. Until then, both operands stay in memory:
those of the head's gradient, logits included, during the whole loop of the backward pass.

Compiled with libtpu 0.0.42.1, for v5e:2x4 and v6e:2x4: steps of four layers of Llama-3 8B under `tp:8 seq`,
`dp:2 tp:4 seq` and `fsdp:2 tp:4 seq`, and of GPT 1.3B under `tp:8 seq`. With `tp` alone, no activation is gathered, and
the same products run at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import numpy as np

from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.equivalence_classes import OperatorClass
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.core.placement import axes_of
from autoshard.spmdrules.ir.program import Program, walk


class DelayedProducts:
    """The gradients of weights that XLA:TPU may compute late.

    Args:
        program: the program.
        roles: the roles of its inputs and axes.
        fusion: its kernels.
    """

    def __init__(self, program: Program, roles: Roles, fusion: Fusion):
        self.roles, self.fusion = roles, fusion
        self.last_reads: dict[int, int] = {}  # value -> the number of the last operator that reads it
        ops = list(program.ops())
        made = {v for op in ops if not op.blocks for v in op.results}  # slices of stacks have no buffer of their own
        for number, op in enumerate(ops):
            if (kernel := fusion.kernels.get(id(op))) is not None:
                self.last_reads |= {v: number for v in kernel.reads if v in made}

    def has(self, each: OperatorClass, move: Move, state: Set[int]) -> bool:
        """Whether operators are delayed because of a move of an operand. `state` has the values of the step's state."""
        is_gradient = each.op.name in CONTRACTIONS and each.op.results[0] in self.roles.gradients
        return is_gradient and move.kind == "all-gather" and each.op.operands[move.array] not in state

    def held(self, layout: Layout, each: OperatorClass, move: Move, until: np.ndarray) -> Iterator[LiveBuffers]:
        """Yield the buffers that hold what delayed products read, after its other uses.

        The gathered operand is left out. The result is counted from the operator on, and it does not exist while the
        operands wait, so its bytes are subtracted.

        Args:
            layout: the layout.
            each: the products.
            move: the gather of one of their operands.
            until: for each operator, when it runs if it is delayed.
        """
        reads = each.kernel.reads if each.kernel is not None else ()
        counted = self._local_bytes(layout, each.op.results[0])
        for v in reads:
            if v in self.last_reads and v != each.op.operands[move.array]:
                first = each.members + (self.last_reads[v] + 1 - each.numbers[0])
                late = until[each.members] >= first
                size = self._local_bytes(layout, v)
                yield LiveBuffers(max(size - counted, 0.0), first[late], until[each.members][late])
                counted = max(counted - size, 0.0)

    def _local_bytes(self, layout: Layout, value: int) -> float:
        whole = nbytes(layout.axes.program.avals[value]) * self.fusion.narrow.get(value, 1.0)
        return whole / layout.shard_count(axes_of(layout.spec(value)))


def ends_of_bodies(program: Program) -> np.ndarray:
    """Return the last operator of the loop body that contains each operator, by number; -1 outside of loops."""
    number = {id(op): n for n, op in enumerate(program.ops())}
    found, blocks = np.full(len(number), -1), [program.block]
    while blocks:  # an outer loop before those inside it
        block = blocks.pop()
        if block.loop and block.ops:
            inside = [number[id(op)] for op in walk(block)]
            found[inside[0] : inside[-1] + 1] = inside[-1]
        blocks += [inner for op in block.ops for inner in op.blocks]
    return found
