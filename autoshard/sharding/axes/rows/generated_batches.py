"""Batches that a step generates itself, such as the noise of a GAN's generator or random sample points.

No input has their axis, and no rule unifies it with the batch of the data: generated and real rows meet only in the
loss. Their axis is merged into the batch if it has the same size, the same weights multiply the rows of both, and no
array has both axes. Every mesh axis that shards the batch then shards generated rows too.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS

_ROWS = -1  # placeholder for the class of the rows that are multiplied by a weight


def join_generated_batches(axes: LogicalAxes, batch: int | None) -> None:
    """Merges the axes of generated rows into the batch axis, in place.

    Args:
        axes: the logical axes. `of_value` and `of_op` are changed.
        batch: the batch axis, if there is one.
    """
    if batch is None:
        return
    of_inputs = {c for v in axes.program.inputs for dim in axes.of_value[v] for c in dim}
    same_size = {c for c, size in enumerate(axes.sizes) if size == axes.sizes[batch]}
    candidates = same_size - of_inputs - axes.stacked - {batch}
    while candidates:
        classes_of_values = [{c for dim in leaves for c in dim} for leaves in set(axes.of_value)]
        candidates -= {c for classes in classes_of_values if batch in classes for c in classes}
        uses = {
            (c, use)
            for leaves, weight in _contraction_operands(axes)
            for c, use in _uses(leaves, weight, candidates | {batch})
        }
        generated = {c for c, use in uses if c != batch and (batch, use) in uses}
        if not generated:
            return
        _merge(axes, min(generated), batch)
        candidates.discard(min(generated))


def _contraction_operands(axes: LogicalAxes) -> Iterator[tuple[Leaves, Leaves]]:
    """Yields the classes of both operands of every contraction, in both orders."""
    found: dict[tuple[Leaves, Leaves], None] = {}
    for op in axes.program.ops():
        if op.name in CONTRACTIONS and all(v >= 0 for v in op.operands[:2]):
            left, right = (axes.of_value[v] for v in op.operands[:2])
            found |= {(left, right): None, (right, left): None}
    yield from found


def _uses(leaves: Leaves, weight: Leaves, rows: set[int]) -> Iterator[tuple[int, tuple[Leaves, Leaves]]]:
    """Yields each class of `rows` that is multiplied by a weight without it, and the two operands of that product."""
    of_weight = {c for dim in weight for c in dim}
    for c in {c for dim in leaves for c in dim} & rows - of_weight:
        yield c, (_replace(leaves, c, _ROWS), weight)


def _merge(axes: LogicalAxes, old: int, new: int) -> None:
    memo = {leaves: _replace(leaves, old, new) for leaves in set(axes.of_value)}
    axes.of_value[:] = [memo[leaves] for leaves in axes.of_value]
    axes.of_op[:] = [
        {name: _replace((classes,), old, new)[0] for name, classes in factors.items()} for factors in axes.of_op
    ]


def _replace(leaves: Leaves, old: int, new: int) -> Leaves:
    return tuple(tuple(new if c == old else c for c in dim) for dim in leaves)
