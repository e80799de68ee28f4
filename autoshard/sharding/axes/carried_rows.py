"""Finds steps whose state is data: a cache of keys and values, or a carry, with a row for each row of the batch."""

from __future__ import annotations

from collections.abc import Collection

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import batch_axis
from autoshard.sharding.program.array_sizes import is_float
from autoshard.spmdrules.ir.program import Program


def state_is_data(program: Program, axes: LogicalAxes, state: Collection[int]) -> bool:
    """Return whether each array of the state has the batch, and the step has weights outside the state.

    The batch is the one that is found when no state is known. In a train step, the state has the weights, which lack
    the batch.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated.
    """
    if not (arrays := [v for v in state if program.avals[v].ndim]):
        return False
    batch = batch_axis(program, axes, frozenset())

    def has_batch(v: int) -> bool:
        return any(batch in dim for dim in axes.of_value[v])

    weights = (v for v in program.inputs if v not in state and program.avals[v].ndim > 1 and is_float(program.avals[v]))
    return all(map(has_batch, arrays)) and any(not has_batch(v) for v in weights)
