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

    Each array of the state has the batch then, no product sums over it, and there are weights that lack it and are not
    state. In a train step, the state has the weights. Either they have no axis in common, or it is an axis that a
    product sums over. With few weights, no product may do so, so an array of integers or booleans must have the axis,
    too: lengths, tokens. Those of a train state are scalars.

    Other inputs do not decide which axis it is, because values that are computed from weights alone, such as weights
    that are decoded from codes, may be larger than those of the rows.

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
