"""Finds steps whose state is data: a cache of keys and values, or a carry, with a row for each row of the batch."""

from __future__ import annotations

from collections.abc import Collection

from autoshard.sharding.axes.batch_axis import batch_axis
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.array_sizes import is_float
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program


def state_is_data(program: Program, axes: LogicalAxes, state: Collection[int]) -> bool:
    """Return whether each array of the state has the batch, no product sums over it, and weights are not state.

    The batch is the one that is found when no state is known. In a train step, the state has the weights. Either they
    lack this axis, or it is an axis of theirs, and a product sums over it. With few weights, no product may do so, so
    an array of integers or booleans must have the axis, too: lengths, tokens. Those of a train state are scalars.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated.
    """
    arrays = [v for v in state if program.avals[v].ndim]
    if all(is_float(program.avals[v]) for v in arrays):
        return False
    batch = batch_axis(program, axes, frozenset())

    def has_batch(v: int) -> bool:
        return any(batch in dim for dim in axes.of_value[v])

    weights = (v for v in program.inputs if v not in state and program.avals[v].ndim > 1 and is_float(program.avals[v]))
    return (
        all(map(has_batch, arrays)) and any(not has_batch(v) for v in weights) and not _is_summed(program, axes, batch)
    )


def _is_summed(program: Program, axes: LogicalAxes, axis: int | None) -> bool:
    """Return whether a product sums over an axis."""
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is not None and op.name in CONTRACTIONS:
            if any(f.kind == "reduce" and axis in factors.get(f.name, ()) for f in op.rule.factors):
                return True
    return False
