"""Rows that a product over all tokens of the batch dispatches to experts, and that another one combines again.

In `einsum("tec,td->ecd")` the places `c` of an expert take rows of the whole batch. The result has no batch axis, but
is no weight and no gradient: a value of the batch is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op, Program


def dispatched_rows(
    program: Program, axes: LogicalAxes, batch: int | None, in_parameters: set[int]
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Return the dispatched values, and the axes of their rows.

    Such a value descends from a contraction of two values of the batch over the batch, and a value of the batch
    descends from it. It has an axis that no parameter has: the rows. Gradients have no such axis, and neither have
    updated parameters that the step uses again.

    Args:
        program: the program.
        axes: its logical axes.
        batch: the batch axis, if there is one.
        in_parameters: the axes of parameters.
    """
    if batch is None:
        return frozenset(), ()
    of_leaves = {leaves: {c for dim in leaves for c in dim} for leaves in set(axes.of_value)}
    has_batch = [batch in of_leaves[leaves] for leaves in axes.of_value]
    ops = list(program.ops())
    seeds = {v for op in ops if _is_dispatch(op, has_batch) for v in op.results}
    rows = {c for v in seeds for c in of_leaves[axes.of_value[v]]} - in_parameters - axes.stacked - {batch}
    if not rows:
        return frozenset(), ()

    def may_be(v: int) -> bool:
        return v >= 0 and not has_batch[v] and bool(of_leaves[axes.of_value[v]] & rows)

    below = _closure(ops, {v for v in seeds if may_be(v)}, may_be)
    above: set[int] = set()
    before = -1
    while len(above) > before:
        before = len(above)
        for op in reversed(ops):
            if any(v >= 0 and (has_batch[v] or v in above) for v in op.results):
                above.update(v for v in op.operands if v in below)
            for tie in op.edges:
                if {tie.inner, tie.outer} & above:
                    above.update(v for v in (tie.inner, tie.outer) if v in below)
    return frozenset(above), tuple(sorted({c for v in above for c in of_leaves[axes.of_value[v]]} & rows))


def _is_dispatch(op: Op, has_batch: Sequence[bool]) -> bool:
    """Whether a contraction sums two values of the batch over it."""
    if op.rule is None or op.name not in CONTRACTIONS:
        return False
    return all(v >= 0 and has_batch[v] for v in op.operands[:2]) and not has_batch[op.results[0]]


def _closure(ops: Sequence[Op], found: set[int], may_be: Callable[[int], bool]) -> set[int]:
    """Return the values that descend from those in `found`."""
    before = -1
    while len(found) > before:
        before = len(found)
        for op in ops:
            if any(v in found for v in op.operands):
                found.update(v for v in op.results if may_be(v))
            for tie in op.edges:
                if {tie.inner, tie.outer} & found:
                    found.update(v for v in (tie.inner, tie.outer) if may_be(v))
    return found
