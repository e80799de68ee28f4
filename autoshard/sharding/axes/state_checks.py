"""Checks that state is returned with the leaves, shapes and dtypes that it was passed with.

State is an argument that a function returns updated: part of the results has the same relative paths, shapes and
dtypes. If an argument is returned with other shapes, dtypes or leaves, that is a mistake where the argument is donated,
or where the dataflow shows that it is state: its leaves are returned at the same paths, each computed from itself
element by element. Transformed data (a cropped batch, a batch with an added mask) and gradients of some parameters look
similar, but are not reported.
"""

from __future__ import annotations

import warnings
from typing import Any

from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.sharding.axes.constants import SHOWN_CHANGES, STATE_LEAVES_SHARE
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import find_roles
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.state_matching import StateMismatch
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.ir.program import Program


class StateChangedError(AutoshardError):
    """State is returned with other leaves, shapes or dtypes than it was passed with."""


def check_state_kept(traced: Traced, axes: LogicalAxes) -> None:
    """Raises if a step returns its state changed; warns if an argument is likely to be such state.

    Args:
        traced: the traced step.
        axes: the logical axes of its program.

    Raises:
        StateChangedError: the argument is donated, or is certainly state.
    """
    donated = traced.donated_arguments
    for mismatch in traced.mismatches:
        certain = (_is_donated_state if mismatch.owner in donated else _is_state)(mismatch, traced, axes)
        if certain is None:
            continue
        what = "is donated, but comes back changed" if mismatch.owner in donated else "is state that comes back changed"
        argument = named_path(str(mismatch.owner), traced.arguments)
        text, changes = f"auto_shard({traced.name}): argument '{argument}'", _changes(mismatch, traced)
        if certain:
            raise StateChangedError(
                f"{text} {what}: {changes}. Return it with the leaves, shapes and dtypes that it was passed with"
            )
        warnings.warn(
            f"{text} looks like state that comes back changed: {changes}. A call with the returned value is planned "
            "and compiled again. If it is state, return it with the leaves, shapes and dtypes that it was passed with",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )


def _is_donated_state(mismatch: StateMismatch, traced: Traced, axes: LogicalAxes) -> bool | None:
    """True for a donated argument most of which is returned; None for data, or for a buffer donated for reuse."""
    if mismatch.same_paths:
        return True
    shared = len(mismatch.kept) + len(mismatch.changed)
    most = shared >= len(mismatch.dropped) + len(mismatch.added)
    return True if most and _may_be_state(mismatch, traced, axes) else None


def _is_state(mismatch: StateMismatch, traced: Traced, axes: LogicalAxes) -> bool | None:
    """Whether an argument that is not donated is state.

    Two things are required. Its leaves include parameters, or parameters occur beside them (as beside moments). And of
    the leaves that have a counterpart in the results, at least half are returned unchanged or updated element by
    element; a gradient is neither.

    Returns:
        True if it is certainly state, False if it may be state, None if it is not.
    """
    program = traced.program
    pairs = [(program.inputs[i], program.outputs[o]) for i, o in (*mismatch.kept, *mismatch.changed)]
    own = [(i, o) for i, o in pairs if _is_update(program, o, i)]
    if len(own) < STATE_LEAVES_SHARE * len(pairs) or not _may_be_state(mismatch, traced, axes):
        return None
    updated = any(i != o for i, o in own)
    kept, differing = len(mismatch.kept), mismatch.differing
    if mismatch.at_own_index or (mismatch.depth == 0 and updated):
        if (kept > differing and (updated or not mismatch.added)) or (kept == differing and mismatch.same_paths):
            return True
        return False if kept >= differing or mismatch.same_paths else None
    return False if kept > differing and updated and mismatch.same_paths else None


def _may_be_state(mismatch: StateMismatch, traced: Traced, axes: LogicalAxes) -> bool:
    """Whether the program has parameters once this argument counts as state.

    An argument whose arrays all have the same leading dimension, and have it nowhere else, is data.
    """
    own = [v for v, owner in zip(traced.program.inputs, traced.owners, strict=True) if owner == mismatch.owner]
    arrays = [v for v in own if traced.program.avals[v].shape]
    leading = {c for v in arrays for c in axes.of_value[v][0]}
    others = {c for v in arrays for dim in axes.of_value[v][1:] for c in dim}
    if len({traced.program.avals[v].shape[0] for v in arrays}) < 2 and not leading & others:
        return False
    state = [traced.program.inputs[i] for i, _ in traced.state]
    return "parameter" in find_roles(traced.program, axes, [*state, *own]).inputs.values()


def _is_update(program: Program, value: int, source: int) -> bool:
    """Whether a value is `source` or computed from it element by element, also through loops and branches."""
    before: dict[int, list[int]] = {}
    for op in program.ops():
        for tie in op.edges:
            if not tie.stacked:
                before.setdefault(tie.outer, []).append(tie.inner)
                before.setdefault(tie.inner, []).append(tie.outer)
        if op.rule is not None:
            for r in op.results:
                shape = program.avals[r].shape
                same = [v for v in op.operands if v >= 0 and program.avals[v].shape == shape]
                elementwise = all(v < 0 or v in same or program.avals[v].shape == () for v in op.operands)
                before.setdefault(r, []).extend(same if elementwise else [])
    visited, todo = {value}, [value]
    while todo:
        v = todo.pop()
        if v == source:
            return True
        todo += [b for b in before.get(v, ()) if b not in visited]
        visited.update(before.get(v, ()))
    return False


def _changes(mismatch: StateMismatch, traced: Traced) -> str:
    """The differences as text, such as `'w' from float32[8,8] to bfloat16[8,8]; 'v' float32[8] is missing`."""

    def name(i: int) -> str:
        return traced.in_paths[i].partition("/")[2]

    avals, results = traced.in_avals, traced.out_avals
    found = [f"'{name(i)}' from {_text(avals[i])} to {_text(results[o])}" for i, o in mismatch.changed]
    found += [f"'{name(i)}' {_text(avals[i])} is missing" for i in mismatch.dropped]
    found += [f"'{path}' {_text(results[o])} is new" for o, path in mismatch.added]
    more = len(found) - SHOWN_CHANGES
    return "; ".join(found[:SHOWN_CHANGES]) + (f" and {more} more" if more > 0 else "")


def _text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
