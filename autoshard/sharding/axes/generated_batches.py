"""Batches that a step makes itself: the noise of a generator, points drawn anew.

No input has their axis, and no rule joins it with that of the data: a generator's samples and real ones meet in a loss
alone. Where such rows are as many as those of the batch, take the same weights, and never stand beside them in one
array, they are made the same logical axis, so that whatever cuts the batch cuts them too.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS

_ROWS = -1  # stands for the class of the rows that meet a weight


def join_generated_batches(axes: LogicalAxes, batch: int | None) -> None:
    """Makes the batch in `axes` of all that take its weights as it does."""
    if batch is None:
        return
    given = {c for v in axes.program.inputs for dim in axes.of_value[v] for c in dim}
    able = {c for c, size in enumerate(axes.sizes) if size == axes.sizes[batch]} - given - axes.stacked - {batch}
    while able:
        having = [{c for dim in leaves for c in dim} for leaves in set(axes.of_value)]
        able -= {c for classes in having if batch in classes for c in classes}
        meets = {(c, met) for leaves, weight in _products(axes) for c, met in _meetings(leaves, weight, able | {batch})}
        same = {c for c, met in meets if c != batch and (batch, met) in meets}
        if not same:
            return
        _rename(axes, min(same), batch)
        able.discard(min(same))


def _products(axes: LogicalAxes) -> Iterator[tuple[Leaves, Leaves]]:
    """The classes of both operands of every contraction, in either order."""
    found: dict[tuple[Leaves, Leaves], None] = {}
    for op in axes.program.ops():
        if op.name in CONTRACTIONS and all(v >= 0 for v in op.operands[:2]):
            left, right = (axes.of_value[v] for v in op.operands[:2])
            found |= {(left, right): None, (right, left): None}
    yield from found


def _meetings(leaves: Leaves, weight: Leaves, able: set[int]) -> Iterator[tuple[int, tuple[Leaves, Leaves]]]:
    """Which rows meet a weight that does not have them, and what they stand beside there."""
    of_weight = {c for dim in weight for c in dim}
    for rows in {c for dim in leaves for c in dim} & able - of_weight:
        yield rows, (_with(leaves, rows, _ROWS), weight)


def _rename(axes: LogicalAxes, old: int, new: int) -> None:
    memo = {leaves: _with(leaves, old, new) for leaves in set(axes.of_value)}
    axes.of_value[:] = [memo[leaves] for leaves in axes.of_value]
    axes.of_op[:] = [
        {name: _with((classes,), old, new)[0] for name, classes in factors.items()} for factors in axes.of_op
    ]


def _with(leaves: Leaves, old: int, new: int) -> Leaves:
    return tuple(tuple(new if c == old else c for c in dim) for dim in leaves)
