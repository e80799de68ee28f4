"""Finds steps whose state is data: a cache of keys and values, or a carry, with a row for each row of the batch."""

from __future__ import annotations

from collections.abc import Collection

from autoshard.sharding.axes.batch_axis import batch_axis
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.array_sizes import is_float
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program


def carried_batch(program: Program, axes: LogicalAxes, state: Collection[int]) -> int | None:
    """Return the batch if the state is data; None if it is not.

    The state is data if each of its arrays has the batch, no product sums over the batch, and some weights are not in
    the state and lack the batch. A train step is different, because its state contains the weights. Either the weights
    have no axis in common, or a product sums over it. If there are few weights, no product may do so. So an array of
    integers or booleans, such as lengths or tokens, must have the batch, too. In a train state, these are scalars.

    Only axes that all arrays of the state have can be the batch. Otherwise values that are computed from weights alone,
    such as weights decoded from codes, could decide, because they may be larger than the values of the rows.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated.
    """
    arrays = [v for v in state if program.avals[v].ndim]
    if all(is_float(program.avals[v]) for v in arrays):
        return None
    common = frozenset.intersection(*(frozenset(c for dim in axes.of_value[v] for c in dim) for v in arrays))
    batch = batch_axis(program, axes, frozenset(), common) if common else None
    if batch not in common:
        return None
    weights = (v for v in program.inputs if v not in state and program.avals[v].ndim > 1 and is_float(program.avals[v]))
    lacking = any(all(batch not in dim for dim in axes.of_value[v]) for v in weights)
    return batch if lacking and not _is_summed(program, axes, batch) else None


def _is_summed(program: Program, axes: LogicalAxes, axis: int | None) -> bool:
    """Return whether a product sums over an axis."""
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is not None and op.name in CONTRACTIONS:
            if any(f.kind == "reduce" and axis in factors.get(f.name, ()) for f in op.rule.factors):
                return True
    return False
