"""Steps with a single row whose state is data, such as the decode step of one prompt.

Dimensions of size 1 have no logical axis, so the batch is not an axis. Instead, the values of the row are found by
their sources: values that are computed from the state, or from integers of the data, belong to the row. The others are
weights.
"""

from __future__ import annotations

from collections.abc import Collection

from autoshard.sharding.program.array_sizes import is_float
from autoshard.spmdrules.ir.program import Op, Program

# Operators that take a part of a weight, such as the matrix of one expert, at a position that the row computes. The
# result is a weight.
_PARTS = ("dynamic_slice",)


def values_of_single_row(program: Program, state: Collection[int]) -> frozenset[int]:
    """Return the values that belong to the only row of a step; none if it is not a step with a single row.

    In such a step, all arrays of the state have a dimension of size 1. Some of them are integers or booleans, such as
    tokens and lengths; in a train state, integers are scalars. The weights are matrices that are not in the state.

    Args:
        program: the program.
        state: the inputs that the program returns updated.
    """
    arrays = [v for v in state if program.avals[v].ndim]
    inputs = [v for v in program.inputs if v not in state]
    has_weights = any(program.avals[v].ndim > 1 and is_float(program.avals[v]) for v in inputs)
    has_integers = any(not is_float(program.avals[v]) for v in arrays)
    if not (has_weights and has_integers and all(1 in program.avals[v].shape for v in arrays)):
        return frozenset()
    return _computed_from(program, {*arrays, *(v for v in inputs if not is_float(program.avals[v]))})


def _computed_from(program: Program, first: set[int]) -> frozenset[int]:
    """Return these values and those that are computed from them."""
    ops, found, before = list(program.ops()), set(first), -1
    while len(found) > before:  # repeated because loops carry values
        before = len(found)
        for op in ops:
            if op.rule is not None and any(v in found for v in _sources(op)):
                found.update(op.results)
            for tie in op.edges:
                if {tie.outer, tie.inner} & found:
                    found.update((tie.outer, tie.inner))
    return frozenset(v for v in found if v >= 0)


def _sources(op: Op) -> Collection[int]:
    return op.operands[:1] if op.name in _PARTS else op.operands
