"""Gradients that JAX computes transposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from autoshard.spmdrules.ir.program import Program


def transposed_gradients(program: Program, gradients: Collection[int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Gradients whose only use is a transpose -> its result and its permutation."""
    uses = Counter(v for op in program.ops() for v in op.operands)
    return {
        op.operands[0]: (op.results[0], tuple(op.eqn.params["permutation"]))
        for op in program.ops()
        if op.name == "transpose" and op.operands[0] in gradients and uses[op.operands[0]] == 1
    }
