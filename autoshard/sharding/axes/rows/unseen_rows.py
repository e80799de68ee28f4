"""Axes of rows that no input has alone: the state has them, too, or the step concatenates or draws its rows.

Examples are the memory of Transformer-XL, which is a part of the state, and the chosen and rejected answers of a
preference loss, which are concatenated.
"""

from __future__ import annotations

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.array_sizes import is_float
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program, inlined


def unseen_rows(program: Program, axes: LogicalAxes, state: frozenset[int], found: int) -> set[int]:
    """Return the axes that count rows, where `found` counts positions within each row.

    Such an axis meets three conditions:

    1. It is the first dimension of data that have `found` as a later dimension.
    2. Some matrices of the state lack it: the weights.
    3. No product sums over it and keeps `found`. A product with a weight does so if the axis counts features.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated.
        found: an axis of the data that is not the first dimension of any input.
    """
    data = [axes.of_value[v] for v in _data(program, state)]
    first = {dims[0][0] for dims in data if dims and dims[0] and any(found in dim for dim in dims[1:])}
    matrices = [axes.of_value[v] for v in state if program.avals[v].ndim > 1 and is_float(program.avals[v])]
    rows = {c for c in first - axes.stacked if any(all(c not in dim for dim in dims) for dims in matrices)}
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if rows and op.rule is not None and op.name in CONTRACTIONS:
            if any(found in dim for v in op.results for dim in axes.of_value[v]):
                rows -= {c for f in op.rule.factors if f.kind == "reduce" for c in factors.get(f.name, ())}
    return rows


def _data(program: Program, state: frozenset[int]) -> set[int]:
    """Return the inputs that are not state, and the values that are computed from them alone before any product."""
    found = {v for v in program.inputs if v not in state}
    for op in inlined(program.block):
        if op.rule is not None and op.name not in (*CONTRACTIONS, "transpose"):
            if any(v in found for v in op.operands) and all(v < 0 or v in found for v in op.operands):
                found.update(op.results)
    return found
