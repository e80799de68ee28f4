"""What of a function is state: the arguments that come back, and those that come back changed.

State is an argument that comes back: a part of the results whose leaves have the same relative paths, shapes and
dtypes. An argument that comes back with other shapes, dtypes or leaves is a mistake where it is donated, or where the
dataflow shows that it is state: its leaves come back where they stood, each made of itself. Functions of data (a batch
that is cropped or gets a mask) and gradients of some of the parameters look alike, and are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from autoshard._shown import shown
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import find_roles
from autoshard.spmdrules.ir.program import Program

if TYPE_CHECKING:
    from autoshard.sharding.program.tracing import Traced

NAMED = 5  # changes that a message lists
Words = tuple[str, ...]


class StateChangedError(AutoshardError):
    """A state that does not come back as it went in."""


@shown
@dataclass(frozen=True)
class Drift:
    """An argument and the part of the results that is most like it, but not the same.

    Attributes:
        owner: the argument's number.
        kept: pairs (input leaf, output leaf) of the same path, shape and dtype.
        changed: pairs of the same path and another shape or dtype.
        dropped: input leaves that do not come back.
        added: output leaves that did not go in, with their paths in that part.
        depth: how deep in the results the part stands; 0 is all of them.
        stands: whether it is the result with the argument's own number.
    """

    owner: int
    kept: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]
    added: tuple[tuple[int, str], ...]
    depth: int
    stands: bool

    @property
    def odd(self) -> int:
        """How many leaves are not as they were."""
        return len(self.changed) + len(self.dropped) + len(self.added)

    @property
    def same_paths(self) -> bool:
        """Whether only shapes or dtypes differ."""
        return not self.dropped and not self.added


@dataclass(frozen=True)
class Matches:
    """How arguments and results belong together.

    Attributes:
        state: pairs (input leaf, output leaf) of what comes back, each result used once.
        alike: pairs of results that have the leaves of an argument that came back already: moments, gradients.
        drifts: the arguments that nearly come back.
    """

    state: list[tuple[int, int]]
    alike: list[tuple[int, int]]
    drifts: list[Drift]


def match(
    arguments: Mapping[int, Mapping[Words, int]],
    avals: Sequence[Any],
    out_keys: Sequence[Any],
    out_avals: Sequence[Any],
    donated: frozenset[int],
) -> Matches:
    """Pairs each argument with the part of the results that has the same leaves, each part used once.

    Args:
        arguments: number of each positional argument -> its leaves by relative path.
        avals: shape and dtype of each input leaf.
        out_keys: key path of each output leaf.
        out_avals: shape and dtype of each output leaf.
        donated: the arguments whose buffers the results may take.
    """
    parts: dict[Words, dict[Words, int]] = {}
    for n, keys in enumerate(out_keys):
        words = tuple(map(str, keys))
        for depth in range(min(3, len(words)) + 1):
            parts.setdefault(words[:depth], {})[words[depth:]] = n
    used: set[int] = set()
    state, alike = [], []
    found: set[int] = set()
    for owner, leaves in sorted(arguments.items()):
        fits = [p for p in parts.values() if p.keys() == leaves.keys() and not used & set(p.values())]
        if len(leaves) == 1 and owner not in donated:  # a lone array: an activation, unless it stands where it stood
            fits = [p for p in fits if len(out_keys) > 1 and _stands_at(out_keys[min(p.values())], owner)]
        same = [p for p in fits if all(_same(avals[leaves[k]], out_avals[p[k]]) for k in leaves)]
        if same:
            state += [(leaves[k], same[0][k]) for k in leaves]
            used |= set(same[0].values())
            found.add(owner)
    for _, leaves in sorted(arguments.items()):  # both moments of an optimizer
        for part in parts.values():
            if len(leaves) > 1 and part.keys() == leaves.keys() and not used & set(part.values()):
                if all(_same(avals[leaves[k]], out_avals[part[k]]) for k in leaves):
                    alike += [(leaves[k], part[k]) for k in leaves]
                    used |= set(part.values())
    left = {prefix: part for prefix, part in parts.items() if not used & set(part.values())}
    drifts = [
        drift
        for owner, leaves in sorted(arguments.items())
        if owner not in found and len(leaves) > 1
        for drift in _nearest(owner, leaves, left, avals, out_keys, out_avals, owner in donated)
    ]
    return Matches(state, alike, drifts)


def _nearest(
    owner: int,
    leaves: Mapping[Words, int],
    parts: Mapping[Words, Mapping[Words, int]],
    avals: Sequence[Any],
    out_keys: Sequence[Any],
    out_avals: Sequence[Any],
    donated: bool,
) -> list[Drift]:
    """The part of the results that has most of an argument's leaves, if one has any."""
    found = []
    for prefix, part in parts.items():
        first = out_keys[min(part.values())]
        if not prefix and (not first or isinstance(first[0], jax.tree_util.SequenceKey)):
            if len(first) < 2 or not donated:
                continue  # positions among the results and in a tuple argument say nothing of each other
        shared = [(leaves[k], part[k]) for k in leaves if k in part]
        kept = tuple(pair for pair in shared if _same(avals[pair[0]], out_avals[pair[1]]))
        if not kept and part.keys() != leaves.keys():
            continue
        added = tuple(
            (n, jax.tree_util.keystr(out_keys[n][len(prefix) :], simple=True, separator="/"))
            for k, n in part.items()
            if k not in leaves
        )
        dropped = tuple(i for k, i in leaves.items() if k not in part)
        changed = tuple(pair for pair in shared if pair not in kept)
        stands = len(prefix) == 1 and _stands_at(first, owner)
        found.append(Drift(owner, kept, changed, dropped, added, len(prefix), stands))
    return sorted(found, key=lambda d: (-len(d.kept), d.odd, not d.stands))[:1]


def _stands_at(keys: Any, owner: int) -> bool:
    return len(keys) > 0 and getattr(keys[0], "idx", None) == owner


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def complain_of_changes(traced: Traced, axes: LogicalAxes) -> None:
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


def _surely_donated(drift: Drift, traced: Traced, axes: LogicalAxes) -> bool | None:
    """True for a donated argument that most of comes back, None for one that is data or is used up."""
    if drift.same_paths:
        return True
    shared = len(drift.kept) + len(drift.changed)
    return True if shared >= len(drift.dropped) + len(drift.added) and _may_be_state(drift, traced, axes) else None


def _surely_state(drift: Drift, traced: Traced, axes: LogicalAxes) -> bool | None:
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


def _may_be_state(drift: Drift, traced: Traced, axes: LogicalAxes) -> bool:
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


def _changes(drift: Drift, traced: Traced) -> str:
    """What differs, `'w' from float32[8,8] to bfloat16[8,8]; 'v' is missing`."""

    def name(i: int) -> str:
        return traced.in_paths[i].partition("/")[2]

    found = [f"'{name(i)}' from {_text(traced.in_avals[i])} to {_text(traced.out_avals[o])}" for i, o in drift.changed]
    found += [f"'{name(i)}' {_text(traced.in_avals[i])} is missing" for i in drift.dropped]
    found += [f"'{path}' {_text(traced.out_avals[o])} is new" for o, path in drift.added]
    return "; ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")


def _text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
