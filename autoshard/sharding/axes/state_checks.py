"""What of a function is state: the arguments that come back, and those that come back changed.

State is an argument that comes back: a part of the results whose leaves have the same relative paths, shapes and
dtypes. An argument that comes back with other shapes, dtypes or leaves is a mistake where it is donated, or where the
dataflow shows that it is state: its leaves come back where they stood, each made of itself. Functions of data (a batch
that is cropped or gets a mask) and gradients of some of the parameters look alike, and are left alone.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import find_roles
from autoshard.spmdrules.ir.program import Program

if TYPE_CHECKING:
    from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.program.state_matching import StateMismatch

NAMED = 5  # changes that a message lists


class StateChangedError(AutoshardError):
    """A state that does not come back as it went in."""


def check_state_kept(traced: Traced, axes: LogicalAxes) -> None:
    """Refuses state that comes back changed; warns of what is likely to be state.

    Raises:
        StateChangedError: it is donated, or nearly all of it comes back.
    """
    donated = {traced.owners[i] for i in traced.donated}
    for drift in traced.drifts:
        sure = (_surely_donated if drift.owner in donated else _surely_state)(drift, traced, axes)
        if sure is None:
            continue
        what = "is donated, but comes back changed" if drift.owner in donated else "is state that comes back changed"
        text, changes = f"auto_shard({traced.name}): argument {drift.owner}", _changes(drift, traced)
        if sure:
            raise StateChangedError(
                f"{text} {what}: {changes}. A step must return its state with the leaves, shapes and dtypes it took"
            )
        warnings.warn(
            f"{text} looks like state that comes back changed: {changes}. The call that takes it is planned and "
            "compiled anew; if it is state, return it with the leaves, shapes and dtypes it went in with",
            AutoshardWarning,
            stacklevel=5,
        )


def _surely_donated(drift: StateMismatch, traced: Traced, axes: LogicalAxes) -> bool | None:
    """True for a donated argument that most of comes back, None for one that is data or is used up."""
    if drift.same_paths:
        return True
    shared = len(drift.kept) + len(drift.changed)
    return True if shared >= len(drift.dropped) + len(drift.added) and _may_be_state(drift, traced, axes) else None


def _surely_state(drift: StateMismatch, traced: Traced, axes: LogicalAxes) -> bool | None:
    """True for what must be state, False for what may be, None for what is not, of arguments that are not donated.

    Evidence is that parameters are among its leaves (or beside them, of moments), and that at least half of what has a
    place in the result is made of what stood there: handed on, or updated element by element. A gradient is not.
    """
    program = traced.program
    pairs = [(program.inputs[i], program.outputs[o]) for i, o in (*drift.kept, *drift.changed)]
    own = [(i, o) for i, o in pairs if _made_of(program, o, i)]
    if 2 * len(own) < len(pairs) or not _may_be_state(drift, traced, axes):
        return None
    updated = any(i != o for i, o in own)
    kept, odd = len(drift.kept), drift.odd
    if drift.stands or (drift.depth == 0 and updated):
        if (kept > odd and (updated or not drift.added)) or (kept == odd and drift.same_paths):
            return True
        return False if kept >= odd or drift.same_paths else None
    return False if kept > odd and updated and drift.same_paths else None


def _may_be_state(drift: StateMismatch, traced: Traced, axes: LogicalAxes) -> bool:
    """Whether an argument, taken as state, has parameters or stands beside them; what shares one dimension is data."""
    mine = [v for v, owner in zip(traced.program.inputs, traced.owners, strict=True) if owner == drift.owner]
    arrays = [v for v in mine if traced.program.avals[v].shape]
    first = {c for v in arrays for c in axes.of_value[v][0]}
    others = {c for v in arrays for dim in axes.of_value[v][1:] for c in dim}
    if len({traced.program.avals[v].shape[0] for v in arrays}) < 2 and not first & others:
        return False
    back = [traced.program.inputs[i] for i, _ in traced.state]
    return "parameter" in find_roles(traced.program, axes, [*back, *mine]).inputs.values()


def _made_of(program: Program, value: int, source: int) -> bool:
    """Whether a value is `source`, or made of it element by element, through loops and branches too."""
    before: dict[int, list[int]] = {}
    for op in program.ops():
        for tie in op.ties:
            if not tie.stacked:
                before.setdefault(tie.outer, []).append(tie.inner)
                before.setdefault(tie.inner, []).append(tie.outer)
        if op.rule is not None:
            for r in op.results:
                shape = program.avals[r].shape
                same = [v for v in op.operands if v >= 0 and program.avals[v].shape == shape]
                alone = all(v < 0 or v in same or program.avals[v].shape == () for v in op.operands)
                before.setdefault(r, []).extend(same if alone else [])
    seen, todo = {value}, [value]
    while todo:
        v = todo.pop()
        if v == source:
            return True
        todo += [b for b in before.get(v, ()) if b not in seen]
        seen.update(before.get(v, ()))
    return False


def _changes(drift: StateMismatch, traced: Traced) -> str:
    """What differs, `'w' from float32[8,8] to bfloat16[8,8]; 'v' is missing`."""

    def name(i: int) -> str:
        return traced.in_paths[i].partition("/")[2]

    found = [f"'{name(i)}' from {_text(traced.in_avals[i])} to {_text(traced.out_avals[o])}" for i, o in drift.changed]
    found += [f"'{name(i)}' {_text(traced.in_avals[i])} is missing" for i in drift.dropped]
    found += [f"'{path}' {_text(traced.out_avals[o])} is new" for o, path in drift.added]
    return "; ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
