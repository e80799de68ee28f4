"""Which results XLA stores in the buffer of another value.

    zeros.at[i].add(u) + x        becomes x.at[i].add(u), in the buffer of x

The gradient of a loss that picks the target's logit with a gather is such a sum: its scatter is as large as the
logits. Compiled for v5e (jaxlib 0.10.2, libtpu 0.0.42) and for h100, the step of a language model has one such array,
not two.
"""

from __future__ import annotations

from collections.abc import Set

from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op, Program, inlined


def scattered_into_sums(program: Program, written: Set[int]) -> frozenset[int]:
    """Return results of scatters into zeros that are only added to another array: they have no buffer of their own.

    Args:
        program: the program.
        written: the values that have a buffer. If the other array is a product without one, such as the other gradient
            of a tied embedding, which is computed inside of the update, the scatter keeps its own.
    """
    ops, kept = [], set(program.outputs)
    blocks = [program.block]
    while blocks:
        for op in inlined(blocks.pop()):
            ops.append(op)
            blocks += op.blocks
            kept.update(v for block in op.blocks for v in block.outputs)
    maker: dict[int, Op] = {}
    users: dict[int, list[Op]] = {}
    for op in ops:
        maker |= dict.fromkeys(op.results, op)
        for v in set(op.operands):
            users.setdefault(v, []).append(op)
    return frozenset(
        op.results[0]
        for op in ops
        if op.name == "scatter-add"
        and op.results[0] not in kept
        and _is_constant(maker.get(op.operands[0]))
        and _is_one_sum(users.get(op.results[0], []))
        and all(v in written or not _is_product(maker.get(v)) for v in users[op.results[0]][0].operands)
    )


def _is_constant(op: Op | None) -> bool:
    """Whether an operator repeats one number."""
    return op is not None and op.name == "broadcast_in_dim" and not op.eqn.invars[0].aval.shape


def _is_product(op: Op | None) -> bool:
    return op is not None and op.name in CONTRACTIONS


def _is_one_sum(users: list[Op]) -> bool:
    """Whether the only user adds two different arrays."""
    return len(users) == 1 and users[0].name in ("add", "add_any") and len(set(users[0].operands)) == 2
