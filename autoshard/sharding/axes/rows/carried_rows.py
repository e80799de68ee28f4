"""Finds steps whose state is data: a cache of keys and values, or a carry, with a row for each row of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.rows.batch_axis import batch_axis
from autoshard.sharding.program.array_sizes import is_float, is_integer, itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program


def carried_batch(program: Program, axes: LogicalAxes, state: Sequence[tuple[int, int]]) -> int | None:
    """Return the batch if the state is data; None if it is not.

    The state is data if each of its arrays has the batch, no product sums over the batch, and some weights are not in
    the state and lack the batch. A train step is different, because its state contains the weights. Either the weights
    have no axis in common, or a product sums over it.

    If there are few weights, no product may do so: the columns of a single matrix are trained independently, as if they
    were rows. So one of two more conditions must hold:

        The state has arrays of integers or booleans, such as lengths or tokens, and they have the batch, too. In a
        train state, such values are scalars. Integers of 8 bits may be codes of moments, so they do not count.

        The batch is the first dimension of an input and of a result outside the state, as in
        `(weights, cache, x) -> (cache, y)`. A train step returns a loss, or predictions; the gradient sums over the
        first dimension of predictions.

    Only axes that all arrays of the state have can be the batch. Otherwise values that are computed from weights alone,
    such as weights decoded from codes, could decide, because they may be larger than the values of the rows.

    Args:
        program: the program.
        axes: its logical axes.
        state: pairs (input, output) of the values that the program returns updated.
    """
    inputs, outputs = ({pair[n] for pair in state} for n in range(2))
    arrays = [v for v in inputs if program.avals[v].ndim]
    common = frozenset.intersection(*(frozenset(_axes_of(axes, v)) for v in arrays)) if arrays else frozenset[int]()
    given = [v for v in program.inputs if v not in inputs]
    if all(is_float(aval := program.avals[v]) or (is_integer(aval) and itemsize(aval) == 1) for v in arrays):
        matrices = (v for v in given if program.avals[v].ndim > 1 or not is_float(program.avals[v]))
        returned = (v for v in program.outputs if v >= 0 and v not in outputs)
        common &= {_first(axes, v) for v in matrices} & {_first(axes, v) for v in returned}
    batch = batch_axis(program, axes, frozenset(), common) if common else None
    if batch not in common:
        return None
    weights = (v for v in given if program.avals[v].ndim > 1 and is_float(program.avals[v]))
    lacking = any(batch not in _axes_of(axes, v) for v in weights)
    return batch if lacking and not _is_summed(program, axes, batch) else None


def _axes_of(axes: LogicalAxes, value: int) -> list[int]:
    """Return the axes of a value, in the order of its dimensions."""
    return [c for dim in axes.of_value[value] for c in dim]


def _first(axes: LogicalAxes, value: int) -> int | None:
    """Return the first logical axis of a value; None if all its dimensions have size 1."""
    return next(iter(_axes_of(axes, value)), None)


def _is_summed(program: Program, axes: LogicalAxes, axis: int | None) -> bool:
    """Return whether a product sums over an axis."""
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is not None and op.name in CONTRACTIONS:
            if any(f.kind == "reduce" and axis in factors.get(f.name, ()) for f in op.rule.factors):
                return True
    return False
