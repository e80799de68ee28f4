"""Running a function on pieces of its operands, and finding out how the pieces of its results go together.

A cut is at a place of a dimension: a dimension of size 12 is seen as (major, ways, rest), and a piece has one of the
ways. A result is put together in one of these ways, of which those are kept that hold on every set of values:

    Part       side by side, at a place of a dimension
    same       every piece is the whole
    sum, ...   the pieces are terms of a reduction
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.sharding.discover.subject import Refused, Subject
from autoshard.sharding.oracle.cases import is_key
from autoshard.sharding.oracle.probe_values import difference, relative_error
from autoshard.sharding.oracle.shards import reduce_pieces

SAME = "same"
_ORDER = (SAME, "sum", "max", "min", "mul", "and", "or", "xor")
_FEWEST_SETS = 3  # of values that tell anything
_SILENT = "only {} of {} sets of values gave results that say anything: finite ones that are not all the same"


@dataclass(frozen=True, order=True)
class Part:
    """A place in a dimension of an operand or of a result, behind so many (`major`) parts of the dimension."""

    array: int
    dim: int
    major: int = 1

    def __str__(self) -> str:
        return f"{self.array} {self.along}"

    @property
    def along(self) -> str:
        """The place in its array, in words."""
        return f"dim {self.dim}" + (f" within each of {self.major} parts" if self.major > 1 else "")


Way = Part | str


@dataclass(frozen=True)
class Outcome:
    """What came of running a function on pieces.

    Attributes:
        cut: the operands' places that were cut together.
        ways: into how many pieces.
        joins: for each result how it is put together; none where there is no way.
        reason: why there is none.
        shrunk: the results' dimensions that are cut, too, by their shapes, of pieces that could be run.
        ran: whether the function could be run on pieces at all.
        sets: how many sets of values it was tried on.
        error: the largest relative error among them.
    """

    cut: tuple[Part, ...]
    ways: int
    joins: tuple[Way, ...] = ()
    reason: str = ""
    shrunk: tuple[Part, ...] = ()
    ran: bool = False
    sets: int = 0
    error: float = 0.0


def attempt(subject: Subject, cut: tuple[Part, ...], ways: int, sets: int | None = None) -> Outcome:
    """Runs a function on pieces and keeps the ways of joining them that always hold.

    Args:
        subject: the function.
        cut: where operands are cut, each at most once.
        ways: into how many pieces.
        sets: on how many sets of values, if not on all.
    """
    shapes = list(subject.shapes)
    for part in cut:
        shapes[part.array] = _shrunk(shapes[part.array], part.dim, ways)
    kinds = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, subject.examples, strict=True)]
    try:
        made = subject.shapes_of(kinds)
    except Refused as error:
        return Outcome(cut, ways, reason=f"it does not take the pieces: {error}")
    shrunk: list[Part] = []
    for r, (whole, piece) in enumerate(zip(subject.results, made, strict=False)):
        pairs = enumerate(zip(whole.shape, piece.shape, strict=False))
        shrunk += [Part(r, d) for d, (n, m) in pairs if len(whole.shape) == len(piece.shape) and n == m * ways]
    found = Outcome(cut, ways, shrunk=tuple(shrunk), ran=True)
    if fault := _shape_fault(subject, made, shrunk):
        return _with(found, reason=fault)
    return _joined(subject, found, sets)


def _shape_fault(subject: Subject, made: Sequence[Any], shrunk: Sequence[Part]) -> str | None:
    if len(made) != len(subject.results):
        return f"it returns {len(made)} arrays of pieces, {len(subject.results)} of the whole"
    for r, (whole, piece) in enumerate(zip(subject.results, made, strict=True)):
        cut = sum(part.array == r for part in shrunk)
        changed = len(whole.shape) != len(piece.shape) or sum(
            n != m for n, m in zip(whole.shape, piece.shape, strict=True)
        )
        if changed != cut or cut > 1:
            return f"result {r} of a piece has shape {tuple(piece.shape)}, of the whole {tuple(whole.shape)}"
    return None


def _joined(subject: Subject, found: Outcome, sets: int | None) -> Outcome:
    """The outcome with what holds on the sets of values."""
    chosen = subject.samples[:sets]
    if len(chosen) < _FEWEST_SETS:
        return _with(found, reason=_SILENT.format(len(chosen), subject.drawn))
    errors: list[dict[Way, float]] = []
    for sample in chosen:
        try:
            pieces = [subject.run(_piece(sample.operands, found, i)) for i in range(found.ways)]
        except Refused as error:
            return _with(found, ran=False, reason=f"it does not take the pieces: {error}")
        for r, expected in enumerate(sample.whole):
            tried = _ways([p[r] for p in pieces], expected.shape, r, subject.results[r].dtype)
            if r == len(errors):
                errors.append(dict.fromkeys(tried, 0.0))
            still = {way: joined for way, joined in tried.items() if way in errors[r]}
            wrong = {way: _error(expected, joined, sample.slack[r]) for way, joined in still.items()}
            held = {way: e for way, e in wrong.items() if e is not None}
            if not held:
                return _with(found, reason=f"result {r}: {_closest(still, expected)}")
            errors[r] = {way: max(errors[r][way], e) for way, e in held.items()}
    return _chosen(subject, found, errors, len(chosen))


def _chosen(subject: Subject, found: Outcome, errors: Sequence[Mapping[Way, float]], sets: int) -> Outcome:
    """Of the ways that hold for each result one, the same for all that lack what is cut."""
    lacking = [r for r, ways in enumerate(errors) if any(isinstance(way, str) for way in ways)]
    common = [op for op in _ORDER if all(op in errors[r] for r in lacking)]
    if not common:
        told = ", ".join(f"result {r}: {'/'.join(w for w in _ORDER if w in errors[r])}" for r in lacking)
        return _with(found, reason=f"results are put together unlike each other, which no rule says: {told}")
    for r in lacking:
        if common[0] != "sum" and not subject.steady[r] and subject.stays(r):
            return _with(found, reason=f"result {r} is the same on all sets of values, which says nothing of it")
    joins = tuple(
        common[0] if r in lacking else min(w for w in ways if isinstance(w, Part)) for r, ways in enumerate(errors)
    )
    worst = max((ways[way] for ways, way in zip(errors, joins, strict=True)), default=0.0)
    return _with(found, joins=joins, sets=sets, error=worst)


def _with(found: Outcome, **changes: Any) -> Outcome:
    return Outcome(**{**vars(found), **changes})


def _shrunk(shape: tuple[int, ...], dim: int, ways: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // ways, *shape[dim + 1 :])


def _piece(operands: Sequence[np.ndarray], found: Outcome, index: int) -> list[np.ndarray]:
    pieces = list(operands)
    for part in found.cut:
        x = pieces[part.array]
        head, tail, n = x.shape[: part.dim], x.shape[part.dim + 1 :], x.shape[part.dim]
        spread = x.reshape((*head, part.major, found.ways, n // (part.major * found.ways), *tail))
        pieces[part.array] = np.take(spread, index, len(head) + 1).reshape((*head, n // found.ways, *tail))
    return pieces


def _ways(pieces: Sequence[np.ndarray], shape: tuple[int, ...], r: int, dtype: Any) -> dict[Way, list[np.ndarray]]:
    """For each way of joining that shapes and type allow, what must all be equal to the whole, of this shape."""
    if pieces[0].shape == shape:
        with np.errstate(all="ignore"):  # a product of large terms is infinite, and not the whole
            return {SAME: list(pieces), **{op: [reduce_pieces(pieces, op)] for op in _reductions(dtype)}}
    dim = next(d for d, (n, m) in enumerate(zip(shape, pieces[0].shape, strict=True)) if n != m)
    size = pieces[0].shape[dim]
    return {Part(r, dim, m): [_side_by_side(pieces, dim, m)] for m in range(1, size + 1) if size % m == 0}


def _reductions(dtype: Any) -> tuple[str, ...]:
    if is_key(dtype):
        return ()
    if dtype == np.bool_:
        return ("and", "or", "xor")
    if jnp.issubdtype(dtype, jnp.integer):
        return ("sum", "max", "min", "mul", "and", "or", "xor")
    return ("sum", "mul") if jnp.issubdtype(dtype, jnp.complexfloating) else ("sum", "max", "min", "mul")


def _side_by_side(pieces: Sequence[np.ndarray], dim: int, major: int) -> np.ndarray:
    shape = pieces[0].shape
    spread = [p.reshape((*shape[:dim], major, shape[dim] // major, *shape[dim + 1 :])) for p in pieces]
    return np.concatenate(spread, dim + 1).reshape((*shape[:dim], shape[dim] * len(pieces), *shape[dim + 1 :]))


def _error(whole: np.ndarray, joined: Sequence[np.ndarray], slack: float) -> float | None:
    """The largest relative error; None if it is more than rounding."""
    if any(difference(whole, x) and difference(whole, x, slack) for x in joined):
        return None
    inexact = jnp.issubdtype(whole.dtype, jnp.inexact)
    return max(relative_error(whole, x) for x in joined) if inexact and whole.size else 0.0


def _closest(joined: Mapping[Way, Sequence[np.ndarray]], whole: np.ndarray) -> str:
    """Which way of joining comes closest to the whole, in words."""
    far = {way: max(relative_error(whole, x) for x in xs) for way, xs in joined.items()}
    best = min(far, key=lambda way: far[way])
    told = f"side by side along {best.along}" if isinstance(best, Part) else best
    off = "" if math.isinf(far[best]) else f", with a relative error of {far[best]:.2g}"
    return f"no way of putting its pieces together gives the whole (the closest: {told}{off})"
