"""Finds the batch axis of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autoshard import _compat
from autoshard.sharding.axes.constants import BATCH_BYTES_SHARE
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.rows.unseen_rows import unseen_rows
from autoshard.sharding.program.array_sizes import axis_weight, is_float
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Program


def batch_axis(
    program: Program, axes: LogicalAxes, state: frozenset[int], among: frozenset[int] = frozenset()
) -> int | None:
    """Finds the batch: of the axes that occur in the most activation bytes, the one nearest to the front of an input.

    If all inputs are state, the step generates its batch itself. If it has no other axes than those of the state, but
    integers among its other inputs have some of them, the function returns gradients of its data, which look like new
    state.

    If no state is known, parameters are inputs like data, and activations have their axes too. An axis that an input
    has twice is that of a square weight, and the batch only if there is no other. The next weight contracts such an
    axis. The batch is contracted by gradients only, which come later, so of several candidates in the same dimension
    the one that is contracted last is taken.

    An axis of the state, or one that no input has, is the batch only if it counts rows (`unseen_rows`).

    Args:
        program: the program.
        axes: its logical axes.
        state: the inputs that the program returns updated.
        among: the axes to choose from; empty for all.
    """
    carried: Counter[int] = Counter()
    for leaves, size in _result_bytes(program, axes).items():
        for c in {c for dim in leaves for c in dim}:
            carried[c] += size
    of_state = {c for v in state for dim in axes.of_value[v] for c in dim}
    position: dict[int, tuple[int, int]] = {}
    for n, v in enumerate(program.inputs):
        if v in state:
            continue
        for d, dim in enumerate(axes.of_value[v]):
            for c in dim:
                position[c] = min(position[c], (d, n)) if c in position else (d, n)
    candidates = {c for c in position if c not in of_state and c not in axes.stacked and carried[c]}
    candidates = {c for c in candidates if c in among} or candidates
    candidates = candidates - _square(program, axes) or candidates
    if not candidates and state:
        # Integers outside the state, such as positions, are data. Then a leaf of the state that has all their axes is
        # data, too. Integers with an axis that no operator carries are only written to the state, such as new rows of a
        # replay buffer.
        integers = (v for v in program.inputs if v not in state and not is_float(program.avals[v]))
        axes_of = [[c for dim in axes.of_value[v] for c in dim] for v in integers]
        is_given = any(own and all(carried[c] for c in own) for own in axes_of)
        generated = None if is_given else _generated_batch(program, axes, carried)
        # with no generated batch, the data was mistaken for state: search again among all inputs
        return generated if generated is not None else batch_axis(program, axes, frozenset())
    if not candidates:
        return None
    most = max(carried[c] for c in candidates)
    summed = {} if state else _first_summed(program, axes)
    last = len(program.avals)

    def order(c: int) -> tuple[int, ...]:
        dim, number = position[c]
        return dim, -summed.get(c, last), number, c

    found = min((c for c in candidates if carried[c] >= BATCH_BYTES_SHARE * most), key=order)
    if state and found not in _trained_rows(program, axes):
        # The step may draw rows from the state, and compare each of them with the data.
        generated = _generated_batch(program, axes, carried)
        if generated is not None and carried[found] < BATCH_BYTES_SHARE * carried[generated]:
            return generated
    unseen = unseen_rows(program, axes, state, found) if position[found][0] else set[int]()
    large = [c for c in unseen if carried[c] >= BATCH_BYTES_SHARE * carried[found]]
    return max(large, key=lambda c: (carried[c], -c), default=found)


def _square(program: Program, axes: LogicalAxes) -> set[int]:
    """The axes that an input has in two dimensions."""
    return {
        c for v in program.inputs for d, dim in enumerate(axes.of_value[v]) for c in dim
        if any(c in other for other in axes.of_value[v][:d])
    }  # fmt: skip


def _generated_batch(program: Program, axes: LogicalAxes, carried: Mapping[int, int]) -> int | None:
    """The batch of a step that generates its rows: the axis of rows with the most bytes that no input has."""
    given = {c for v in program.inputs for dim in axes.of_value[v] for c in dim}
    return max(_trained_rows(program, axes) - given - axes.stacked, key=lambda c: (carried[c], -c), default=None)


def _trained_rows(program: Program, axes: LogicalAxes) -> set[int]:
    """The axes that may count the rows on which weights are trained.

    A product with a weight keeps such an axis. The product that computes the weight's gradient sums over it.
    """
    kept: set[int] = set()
    summed: set[int] = set()
    for op, factors in zip(program.ops(), axes.of_op, strict=True):
        if op.rule is not None and op.name in CONTRACTIONS:
            for f in op.rule.factors:
                (summed if f.kind == "reduce" else kept).update(factors.get(f.name, ()))
    return kept & summed


def _result_bytes(program: Program, axes: LogicalAxes) -> Counter[Leaves]:
    """The bytes of all operators' results in one step, by the classes of the results."""
    found: Counter[Leaves] = Counter()
    for op in program.ops():
        if op.rule is not None:
            for v in op.results:
                if not _compat.is_extended((aval := program.avals[v]).dtype):
                    found[axes.of_value[v]] += int(axis_weight(aval) * op.trips)
    return found


def _first_summed(program: Program, axes: LogicalAxes) -> dict[int, int]:
    """Axis -> the position of the first operator that contracts it or indexes it (a gather)."""
    found: dict[int, int] = {}
    for number, (op, factors) in enumerate(zip(program.ops(), axes.of_op, strict=True)):
        if op.rule is not None and op.name in (*CONTRACTIONS, "gather"):
            kind = "index" if op.name == "gather" else "reduce"
            for f in op.rule.factors:
                if f.kind == kind:
                    for c in factors.get(f.name, ()):
                        found.setdefault(c, number)
    return found
