"""Runs a function on pieces of its operands, and finds how the pieces of its results are joined.

A dimension is split at a place: it is reshaped to (major, ways, rest), and a piece is one index of `ways`. For each
result, the ways of joining that give the whole result on every set of values are kept:

    a Place    the pieces are concatenated at this place of a dimension
    same       every piece equals the whole result
    sum, ...   the pieces are the terms of a reduction
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown
from autoshard.sharding.discover.constants import MIN_SETS
from autoshard.sharding.discover.subject import Refused, Subject
from autoshard.sharding.oracle.cases import is_key
from autoshard.sharding.oracle.probe_values import difference, relative_error
from autoshard.sharding.oracle.shards import reduce_pieces

SAME = "same"
_ORDER = (SAME, "sum", "max", "min", "mul", "and", "or", "xor")
_UNINFORMATIVE = "only {} of {} sets of values gave informative results (finite and not all the same)"


@shown
@dataclass(frozen=True, order=True)
class Place:
    """A place in a dimension of an operand or a result.

    Attributes:
        array: the number of the operand or result.
        dim: the dimension.
        major: the product of the sizes that are major to the place; 1 for the start of the dimension.
    """

    array: int
    dim: int
    major: int = 1

    def __str__(self) -> str:
        return f"{self.array} {self.description}"

    @property
    def description(self) -> str:
        """The place within its array, in words."""
        return f"dim {self.dim}" + (f" within each of {self.major} parts" if self.major > 1 else "")


Way = Place | str


@shown
@dataclass(frozen=True)
class Outcome:
    """The outcome of running a function on pieces.

    Attributes:
        places: the places of operands that were split together.
        piece_count: the number of pieces.
        joins: for each result, how its pieces are joined; empty if there is no way.
        reason: why there is no way.
        shrunk: the dimensions of results that are smaller for a piece by a factor of `piece_count`.
        ran: whether the function could be run on pieces.
        sets: the number of sets of values that the joins were tested on.
        error: the largest relative error on these.
    """

    places: tuple[Place, ...]
    piece_count: int
    joins: tuple[Way, ...] = ()
    reason: str = ""
    shrunk: tuple[Place, ...] = ()
    ran: bool = False
    sets: int = 0
    error: float = 0.0


def attempt(subject: Subject, places: tuple[Place, ...], ways: int, sets: int | None = None) -> Outcome:
    """Runs a function on pieces and keeps the ways of joining them that hold on every set of values.

    Args:
        subject: the function.
        places: the places to split, at most one per operand.
        ways: the number of pieces.
        sets: the number of sets of values. Default: all.
    """
    shapes = list(subject.shapes)
    for place in places:
        shapes[place.array] = _shrunk(shapes[place.array], place.dim, ways)
    types = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, subject.examples, strict=True)]
    try:
        results = subject.shapes_of(types)
    except Refused as error:
        return Outcome(places, ways, reason=f"it does not accept the pieces: {error}")
    shrunk: list[Place] = []
    for r, (whole, piece) in enumerate(zip(subject.results, results, strict=False)):
        pairs = enumerate(zip(whole.shape, piece.shape, strict=False))
        shrunk += [Place(r, d) for d, (n, m) in pairs if len(whole.shape) == len(piece.shape) and n == m * ways]
    outcome = Outcome(places, ways, shrunk=tuple(shrunk), ran=True)
    if fault := _shape_fault(subject, results, shrunk):
        return _with(outcome, reason=fault)
    return _try_joins(subject, outcome, sets)


def _shape_fault(subject: Subject, types: Sequence[Any], shrunk: Sequence[Place]) -> str | None:
    if len(types) != len(subject.results):
        return f"it returns {len(types)} arrays for a piece and {len(subject.results)} for the whole"
    for r, (whole, piece) in enumerate(zip(subject.results, types, strict=True)):
        expected = sum(place.array == r for place in shrunk)
        changed = len(whole.shape) != len(piece.shape) or sum(
            n != m for n, m in zip(whole.shape, piece.shape, strict=True)
        )
        if changed != expected or expected > 1:
            return f"result {r} has shape {tuple(piece.shape)} for a piece and {tuple(whole.shape)} for the whole"
    return None


def _try_joins(subject: Subject, outcome: Outcome, sets: int | None) -> Outcome:
    """Completes an outcome with the ways of joining that hold on the sets of values."""
    chosen = subject.samples[:sets]
    if len(chosen) < MIN_SETS:
        return _with(outcome, reason=_UNINFORMATIVE.format(len(chosen), subject.set_count))
    errors: list[dict[Way, float]] = []
    for sample in chosen:
        try:
            pieces = [subject.run(_piece(sample.operands, outcome, i)) for i in range(outcome.piece_count)]
        except Refused as error:
            return _with(outcome, ran=False, reason=f"it does not accept the pieces: {error}")
        for r, expected in enumerate(sample.whole):
            tried = _ways([p[r] for p in pieces], expected.shape, r, subject.results[r].dtype)
            if r == len(errors):
                errors.append(dict.fromkeys(tried, 0.0))
            remaining = {way: joined for way, joined in tried.items() if way in errors[r]}
            measured = {way: _error(expected, joined, sample.slack[r]) for way, joined in remaining.items()}
            agreeing = {way: e for way, e in measured.items() if e is not None}
            if not agreeing:
                return _with(outcome, reason=f"result {r}: {_closest(remaining, expected)}")
            errors[r] = {way: max(errors[r][way], e) for way, e in agreeing.items()}
    return _choose_joins(subject, outcome, errors, len(chosen))


def _choose_joins(subject: Subject, outcome: Outcome, errors: Sequence[Mapping[Way, float]], sets: int) -> Outcome:
    """Chooses one of the ways that hold for each result, the same for all results that the split does not shrink."""
    unsplit = [r for r, ways in enumerate(errors) if any(isinstance(way, str) for way in ways)]
    common = [op for op in _ORDER if all(op in errors[r] for r in unsplit)]
    if not common:
        listed = ", ".join(f"result {r}: {'/'.join(w for w in _ORDER if w in errors[r])}" for r in unsplit)
        return _with(outcome, reason=f"results are joined in different ways, which no rule can express: {listed}")
    for r in unsplit:
        if common[0] != "sum" and not subject.independent[r] and subject.is_constant(r):
            return _with(outcome, reason=f"result {r} is the same on all sets of values, so it proves nothing")
    joins = tuple(
        common[0] if r in unsplit else min(w for w in ways if isinstance(w, Place)) for r, ways in enumerate(errors)
    )
    worst = max((ways[way] for ways, way in zip(errors, joins, strict=True)), default=0.0)
    return _with(outcome, joins=joins, sets=sets, error=worst)


def _with(outcome: Outcome, **changes: Any) -> Outcome:
    return Outcome(**{**vars(outcome), **changes})


def _shrunk(shape: tuple[int, ...], dim: int, ways: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // ways, *shape[dim + 1 :])


def _piece(operands: Sequence[np.ndarray], outcome: Outcome, index: int) -> list[np.ndarray]:
    pieces = list(operands)
    for place in outcome.places:
        x = pieces[place.array]
        head, tail, n = x.shape[: place.dim], x.shape[place.dim + 1 :], x.shape[place.dim]
        spread = x.reshape((*head, place.major, outcome.piece_count, n // (place.major * outcome.piece_count), *tail))
        pieces[place.array] = np.take(spread, index, len(head) + 1).reshape((*head, n // outcome.piece_count, *tail))
    return pieces


def _ways(pieces: Sequence[np.ndarray], shape: tuple[int, ...], r: int, dtype: Any) -> dict[Way, list[np.ndarray]]:
    """For each way of joining that the shapes and the dtype allow, the arrays that must equal the whole result."""
    if pieces[0].shape == shape:
        with np.errstate(all="ignore"):  # a product of large terms may overflow; it then differs from the whole
            return {SAME: list(pieces), **{op: [reduce_pieces(pieces, op)] for op in _reductions(dtype)}}
    dim = next(d for d, (n, m) in enumerate(zip(shape, pieces[0].shape, strict=True)) if n != m)
    size = pieces[0].shape[dim]
    return {Place(r, dim, m): [_concatenated(pieces, dim, m)] for m in range(1, size + 1) if size % m == 0}


def _reductions(dtype: Any) -> tuple[str, ...]:
    if is_key(dtype):
        return ()
    if dtype == np.bool_:
        return ("and", "or", "xor")
    if jnp.issubdtype(dtype, jnp.integer):
        return ("sum", "max", "min", "mul", "and", "or", "xor")
    return ("sum", "mul") if jnp.issubdtype(dtype, jnp.complexfloating) else ("sum", "max", "min", "mul")


def _concatenated(pieces: Sequence[np.ndarray], dim: int, major: int) -> np.ndarray:
    shape = pieces[0].shape
    spread = [p.reshape((*shape[:dim], major, shape[dim] // major, *shape[dim + 1 :])) for p in pieces]
    return np.concatenate(spread, dim + 1).reshape((*shape[:dim], shape[dim] * len(pieces), *shape[dim + 1 :]))


def _error(whole: np.ndarray, joined: Sequence[np.ndarray], slack: float) -> float | None:
    """The largest relative error; None if rounding does not explain it."""
    if any(difference(whole, x) and difference(whole, x, slack) for x in joined):
        return None
    inexact = jnp.issubdtype(whole.dtype, jnp.inexact)
    return max(relative_error(whole, x) for x in joined) if inexact and whole.size else 0.0


def _closest(joined: Mapping[Way, Sequence[np.ndarray]], whole: np.ndarray) -> str:
    """Describes the way of joining that comes closest to the whole result."""
    far = {way: max(relative_error(whole, x) for x in xs) for way, xs in joined.items()}
    best = min(far, key=lambda way: far[way])
    closest = f"concatenated along {best.description}" if isinstance(best, Place) else best
    off = "" if math.isinf(far[best]) else f", with a relative error of {far[best]:.2g}"
    return f"no way of joining its pieces gives the whole (the closest: {closest}{off})"
