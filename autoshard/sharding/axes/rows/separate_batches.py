"""Finds further batches in the data of a step.

Examples are labelled and unlabelled rows, queries and documents, and points inside a domain and on its boundary. The
batches may have different sizes, so each has its own logical axis and its own activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.rows.loop_counts import counted_axes
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program


def separate_batches(
    program: Program, axes: LogicalAxes, state: Sequence[int], batch: int | None, known: Set[int] = frozenset()
) -> tuple[int, ...]:
    """Return the axes of all batches but the first, in the order of the inputs.

    Such an axis meets three conditions, or the first one and the fourth:

    1. It is the first dimension of inputs that are not state, and not a later dimension of any input. This excludes
       axes of frozen weights: such an axis is the last dimension of one weight and the first dimension of the next.
       Leading dimensions over which a loop runs do not count, such as that of the stacked batches of an evaluation.
    2. It is kept by a product with a weight, and neither operand has the batch axis.
    3. It is kept by no product with a weight whose other operand has the batch axis, too. Such an axis is a sequence,
       for example of points at which each row is evaluated.
    4. Its rows are concatenated with others, and the batch counts the result.

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated. Without any, data cannot be told from weights.
        batch: the batch axis, if there is one.
        known: axes that are known to be rows.
    """
    if batch is None or not state:
        return ()
    of_state = [axes.of_value[v] for v in program.inputs if v in {*state}]
    counts = axes.stacked | counted_axes(axes)
    of_data = [_behind(axes.of_value[v], counts) for v in program.inputs if v not in {*state}]
    leading = dict.fromkeys(dims[0][0] for dims in of_data if dims and len(dims[0]) == 1)
    elsewhere = set[int]().union(*map(_classes, of_state), *(_classes(dims[1:]) for dims in of_data))
    candidates = leading.keys() - elsewhere - axes.stacked - known
    if not candidates:
        return ()
    apart, together = set[int](), set[int]()
    for left, right, result in {*_contractions(axes)}:
        for rows, weight in ((left, right), (right, left)):
            if batch not in weight and not weight & candidates:
                (together if batch in rows else apart).update(rows & result & candidates)
    found = apart - together | candidates & _concatenated(axes, batch)
    return tuple(c for c in leading if c in found)


def _behind(dims: Leaves, counts: Set[int]) -> Leaves:
    """Return the dimensions that follow the leading loop dimensions."""
    return tuple(itertools.dropwhile(lambda dim: len(dim) == 1 and dim[0] in counts, dims))


def _concatenated(axes: LogicalAxes, batch: int) -> set[int]:
    """Return the axes of rows that the step concatenates to make the batch."""
    found: set[int] = set()
    for op in axes.program.ops():
        if op.name == "concatenate" and (batch,) == axes.of_value[op.results[0]][d := op.eqn.params["dimension"]]:
            found.update(c for v in op.operands if v >= 0 for c in axes.of_value[v][d])
    return found


def _contractions(axes: LogicalAxes) -> Iterator[tuple[frozenset[int], frozenset[int], frozenset[int]]]:
    """Yield the logical axes of both operands and of the result of each contraction."""
    for op in axes.program.ops():
        if op.name in CONTRACTIONS and all(v >= 0 for v in op.operands[:2]):
            left, right, result = (_classes(axes.of_value[v]) for v in (*op.operands[:2], op.results[0]))
            yield left, right, result


def _classes(leaves: Leaves) -> frozenset[int]:
    return frozenset(c for dim in leaves for c in dim)
