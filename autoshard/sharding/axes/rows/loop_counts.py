"""Axes that count the iterations of a loop, such as those of stacked batches that a loop takes one by one."""

from __future__ import annotations

from autoshard.sharding.axes.logical_axes import LogicalAxes


def counted_axes(axes: LogicalAxes) -> set[int]:
    """Return the axes from which each iteration of a loop takes one element with `dynamic_slice`.

    The axes that `lax.scan` slices are in `LogicalAxes.stacked`.
    """
    found: set[int] = set()
    for op, factors in zip(axes.program.ops(), axes.of_op, strict=True):
        if op.name == "dynamic_slice" and op.rule is not None and op.trips > 1:
            for dim, size in zip(op.rule.operands[0], op.eqn.params["slice_sizes"], strict=True):
                found.update(c for f in dim if size == 1 for c in factors.get(f, ()))
    return found
