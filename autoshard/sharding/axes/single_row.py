"""Steps with a single row whose state is data, such as the decode step of one prompt.

Dimensions of size 1 have no logical axis, so the batch is not an axis. What a value is follows from what it is computed
from instead: values that are computed from the state or from integers of the data belong to the row, and the others are
weights.
"""

from __future__ import annotations

from collections.abc import Collection

from autoshard.sharding.program.array_sizes import is_float
from autoshard.spmdrules.ir.program import Op, Program

# With a number that the row computes, these take a part of a weight, such as one expert's matrix. It is a weight still.
_PARTS = ("dynamic_slice",)


def values_of_single_row(program: Program, state: Collection[int]) -> frozenset[int]:
    """Return the values that belong to the only row of a step; none if the step is not such.

    All arrays of the state have a dimension of size 1 then. Some are integers or booleans, such as tokens and lengths:
    those of a train state are scalars. And matrices are not in the state: the weights.

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
    while len(found) > before:  # again for what a loop carries
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
