"""Gradients: values without rows of the batch that are computed from values with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.spmdrules.ir.program import Program


def gradients_of(
    program: Program, axes: LogicalAxes, batch: int | None, other_rows: Collection[int] = ()
) -> frozenset[int]:
    """Return the gradients, and the updated moments and parameters.

    These are the arrays without the batch that depend on an array with the batch. If a carry is such an array after a
    loop, as accumulated gradients are, it counts as one at the start of each iteration, too.

    Args:
        program: the program.
        axes: its logical axes.
        batch: the batch, if there is one.
        other_rows: axes that count as the batch, see `Roles`.
    """
    if batch is None:
        return frozenset()
    rows = {batch, *other_rows}
    of_leaves = {leaves: any([not rows.isdisjoint(dim) for dim in leaves]) for leaves in set(axes.of_value)}
    has_batch = [of_leaves[leaves] for leaves in axes.of_value]
    inputs, found, before = set(program.inputs), set(), -1
    reached = [*has_batch, False]  # has the batch or is found; the last one is for literals, which have the number -1

    def add(values: Iterable[int]) -> None:
        for v in values:
            if not reached[v] and v not in inputs:
                reached[v] = True
                found.add(v)

    while len(found) > before:
        before = len(found)
        for op in program.ops():
            if op.rule is not None:
                if any([reached[v] for v in op.operands]):
                    add(op.results)
                continue
            for tie in op.edges:
                if tie.outer in found or tie.inner in found:
                    add((tie.outer, tie.inner))
    return frozenset(v for v in found if len(program.avals[v].shape) > 0)
