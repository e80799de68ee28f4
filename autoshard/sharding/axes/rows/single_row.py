"""Steps with a single row whose state is data, such as the decode step of one prompt.

Dimensions of size 1 have no logical axis, so the batch is not an axis. Instead, the values of the row are found by
their sources: values that are computed from the state, or from integers or features of the data, belong to the row. The
others are weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autoshard.sharding.program.array_sizes import is_float
from autoshard.spmdrules.ir.program import Op, Program

# Operators that take a part of a weight, such as the matrix of one expert, at a position that the row computes. The
# result is a weight.
_PARTS = ("dynamic_slice",)


def values_of_single_row(program: Program, state: Sequence[tuple[int, int]], owners: Sequence[int]) -> frozenset[int]:
    """Return the values that belong to the only row of a step; none if it is not a step with a single row.

    In such a step, all arrays of the state have a dimension of size 1, and the weights are matrices outside the state.
    One of two more conditions holds:

        Some arrays of the state are integers or booleans, such as tokens and lengths. In a train state, integers are
        scalars.

        The step has an argument whose arrays all are features `[1, ...]`, and it returns such features, both outside
        the state.

    Args:
        program: the program.
        state: pairs (input, output) of the values that the program returns updated.
        owners: for each input the index of its argument.
    """
    carried, returned = ({pair[n] for pair in state} for n in range(2))
    arrays = [v for v in carried if program.avals[v].ndim]
    if not all(1 in program.avals[v].shape for v in arrays):
        return frozenset()
    rows = set[int]()
    if all(is_float(program.avals[v]) for v in arrays):
        rows = _rows(program, carried, owners)
        if not rows or not any(_is_row(program, v) for v in program.outputs if v >= 0 and v not in returned):
            return frozenset()
    inputs = [v for v in program.inputs if v not in carried and v not in rows]
    if not any(program.avals[v].ndim > 1 and is_float(program.avals[v]) for v in inputs):
        return frozenset()
    return _computed_from(program, {*arrays, *rows, *(v for v in inputs if not is_float(program.avals[v]))})


def _rows(program: Program, state: Collection[int], owners: Sequence[int]) -> set[int]:
    """Return the inputs of arguments that have no other arrays than rows."""
    inputs = [*zip(program.inputs, owners, strict=True)]
    others = {owner for v, owner in inputs if v in state or (program.avals[v].ndim and not _is_row(program, v))}
    return {v for v, owner in inputs if program.avals[v].ndim and owner not in others}


def _is_row(program: Program, value: int) -> bool:
    return program.avals[value].ndim > 1 and program.avals[value].shape[0] == 1


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
