"""One matched region: the values that compute an attention and its gradients, its axes by role, and its masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.kernels.visibility import Visibility
from autoshard.sharding.rewrite.attention_forward import Candidate
from autoshard.sharding.rewrite.attention_gradient import Gradients
from autoshard.sharding.rewrite.attention_roles import Roles, mask_dims, roles_of, sides_of
from autoshard.sharding.rewrite.constants import MOST_CONDITIONS
from autoshard.sharding.rewrite.masks.array_masks import Reading, Row, readings
from autoshard.sharding.rewrite.masks.segment_ids import SegmentMask
from autoshard.sharding.rewrite.masks.static_masks import StaticArray, static_array
from autoshard.sharding.rewrite.numpy_operators import wide
from autoshard.sharding.rewrite.shrinking import SmallShapes
from autoshard.sharding.rewrite.slices import Refused, Slice
from autoshard.sharding.rewrite.values import Value

SmallRows = Mapping[Any, np.ndarray]  # the key of a row -> its array in small sizes, `[*batch, positions]`


def regions_of(found: Candidate, out: Value, forward: Slice, gradients: Gradients | None) -> Iterator[Region]:
    """Yield the region of an attention, once for each way to read its conditions.

    Raises:
        Refused: a condition can be read in no way.
    """
    slices = [forward, *([gradients.slice] if gradients else [])]
    conditions: list[Value] = list(dict.fromkeys(v for each in slices for v in each.conditions))
    if len(conditions) > MOST_CONDITIONS:
        raise Refused(f"its scores or weights are chosen by {len(conditions)} conditions")
    signs = [[True]] * len(conditions)
    if conditions:
        inner, static = _parts(slices)
        shapes = SmallShapes(inner, [*static, *conditions])
        signs = [[*readings(c, shapes.axes[c], *sides_of(found, shapes))] for c in conditions]
    for chosen in itertools.product(*signs):
        yield Region(found, out, slices, gradients, dict(zip(conditions, chosen, strict=True)))


def _parts(slices: Sequence[Slice]) -> tuple[list[Value], list[Value]]:
    """Return the values in some slices in order, and the static arrays that they take."""
    inner = sorted(dict.fromkeys(v for each in slices for v in each.inner), key=lambda v: v.number)
    return inner, list(dict.fromkeys(v for each in slices for v in each.static))


class Region:
    """One matched region with its axes, masks and roles.

    Attributes:
        inner: the values that the region computes.
        evaluated: these, and the values between its conditions and the arrays that they are made of.
    """

    def __init__(
        self, found: Candidate, out: Value, slices: Sequence[Slice], gradients: Gradients | None,
        signs: Mapping[Value, bool],
    ):  # fmt: skip
        self.found, self.out, self.gradients = found, out, gradients
        self.inner, static = _parts(slices)
        self.shapes, self.evaluated, made = self._shapes(static, signs)
        static = list(dict.fromkeys([*static, *(v for reading in made for v in reading.static)]))
        self.masks = [v for v in static if v.aval.size > 1]
        terms = list({term.key: term for reading in made for term in reading.terms}.values())
        self.roles: Roles = roles_of(found, self.shapes, self.masks, [row for term in terms for row in term.rows])
        self.static: dict[Value, StaticArray] = {
            v: static_array(v, *(mask_dims(self.roles, self.shapes, v) if v.aval.size > 1 else (None, None)))
            for v in static
        }
        kinds = {"q": (found.q, "q"), "k": (found.k, "k"), "v": (found.v, "v"), "out": (out, "out")}
        if gradients:
            kinds |= {"d_out": (gradients.d_out, "out"), "d_q": (gradients.d_q, "q"), "d_k": (gradients.d_k, "k"),
                      "d_v": (gradients.d_v, "v")}  # fmt: skip
        self.arrays: dict[str, Value] = {name: value for name, (value, _) in kinds.items() if value is not None}
        self.folds = {name: self.roles.fold_of(self.shapes, v, kinds[name][1]) for name, v in self.arrays.items()}
        self.segments: SegmentMask | None = None
        if terms:
            axes = (*self.roles.batch, self.roles.queries[0], self.roles.keys[0])
            sizes = tuple(self._size(each) for each in axes)
            self.segments = SegmentMask(tuple(terms), self.roles.batch, axes[-2], axes[-1], sizes)
        if self.visibility != Visibility() or (self.segments is not None and self.segments.is_reflexive):
            self._equal_small_sizes()

    def _shapes(
        self, static: Sequence[Value], signs: Mapping[Value, bool]
    ) -> tuple[SmallShapes, list[Value], list[Reading]]:
        """Return the axes, with those of the conditions, and what the conditions are."""
        shapes = SmallShapes(self.inner, [*static, *signs])
        if not signs:
            return shapes, self.inner, []
        made = self._read(shapes, signs)
        evaluated = sorted({*self.inner, *(v for each in made for v in each.inner)}, key=lambda v: v.number)
        tops = [row.top for each in made for term in each.terms for row in term.rows]
        leaves = [*static, *tops, *(v for each in made for v in each.static)]
        shapes = SmallShapes(evaluated, list(dict.fromkeys(leaves)))
        return shapes, evaluated, self._read(shapes, signs)  # with the axes of the new shapes

    def _read(self, shapes: SmallShapes, signs: Mapping[Value, bool]) -> list[Reading]:
        sides = sides_of(self.found, shapes)
        return [readings(c, shapes.axes[c], *sides)[sign] for c, sign in signs.items()]

    def _size(self, axes: tuple[int, ...]) -> int:
        return int(np.prod([self.shapes.nodes.size[a] for a in axes]))

    def _equal_small_sizes(self) -> None:
        """Give queries and keys the same small size: in a window, each query has to see a key."""
        sides = [role[0] for role in (self.roles.queries, self.roles.keys)]
        if any(len(axes) != 1 for axes in sides):
            raise Refused("the keys cannot be told apart from other dimensions")
        size = max(self.shapes.small[axes[0]] for axes in sides)
        self.shapes.small |= {axes[0]: size for axes in sides}

    @property
    def visibility(self) -> Visibility:
        """Which keys a query sees by position.

        Raises:
            Refused: the masks differ.
        """
        found = {one.visibility for one in self.static.values() if one.hidden is not None}
        if len(found) > 1:
            raise Refused("it has several masks that differ")
        return next(iter(found), Visibility())

    def small_static(self, visibility: Visibility | None) -> dict[Value, Any]:
        """Return the static arrays in small shapes, with another mask; None hides nothing."""
        made = {}
        for value, one in self.static.items():
            shape = self.shapes.shape(value)
            if one.hidden is None or visibility is None:
                made[value] = wide(np.full(shape, one.shown))
                continue
            query, key = mask_dims(self.roles, self.shapes, value)
            index = [
                np.arange(n).reshape([-1 if d == e else 1 for e in range(len(shape))]) for d, n in enumerate(shape)
            ]
            zero = np.zeros((1,) * len(shape), int)
            seen = visibility(zero if query is None else index[query], zero if key is None else index[key])
            made[value] = wide(np.broadcast_to(np.where(seen, one.shown, one.hidden), shape))
        return made

    def small(self, value: Value, rng: np.random.Generator, scale: float) -> np.ndarray:
        """Return random numbers in the small shape of a value."""
        return rng.standard_normal(self.shapes.shape(value)) * scale

    def small_rows(self, rng: np.random.Generator | None) -> SmallRows:
        """Return arrays of the rows in small sizes: random ones, or without `rng` those that hide nothing."""
        if self.segments is None:
            return {}
        made: dict[Any, np.ndarray] = {}
        for term in self.segments.terms:
            first: np.ndarray | None = None
            for row in term.rows:
                side = self.segments.queries if self.segments.queries in row.axes else self.segments.keys
                axes = (*self.segments.batch, side)
                shape = [self._small_size(each) if each in row.axes else 1 for each in axes]
                if term.kind == "equal":
                    x = np.zeros(shape, int) if rng is None else rng.integers(0, 2, shape)
                else:
                    x = np.full(shape, term.is_positive) if rng is None else rng.random(shape) < rng.random()
                if self.segments.is_reflexive and first is not None:
                    x = first
                first = made[row.key] = made.get(row.key, x)
        return made

    def _small_size(self, axes: tuple[int, ...]) -> int:
        return int(np.prod([self.shapes.small[a] for a in axes]))

    def small_tops(self, rows: SmallRows) -> dict[Value, np.ndarray]:
        """Return the arrays of which conditions are made, in small shapes."""
        if self.segments is None:
            return {}
        found = [row for term in self.segments.terms for row in term.rows]
        return {row.top: self._top(row, rows[row.key]) for row in found}

    def _top(self, row: Row, x: np.ndarray) -> np.ndarray:
        assert self.segments is not None
        side = self.segments.queries if self.segments.queries in row.axes else self.segments.keys
        axes = [*self.segments.batch, side]
        present = [each if each in row.axes else () for each in axes]
        order = [present.index(each) for each in row.index if each in present and each]
        x = np.transpose(x, [*order, *(d for d in range(x.ndim) if d not in order)])
        shape = self.shapes.shape(row.top)
        sizes = [n if each in present and each else 1 for each, n in zip(row.index, shape, strict=True)]
        return np.broadcast_to(x.reshape(sizes), shape)

    def seen(self, rows: SmallRows) -> list[np.ndarray]:
        """Return which pairs of a query and a key each term lets see, `[batch, queries, keys]` in small sizes."""
        if self.segments is None:
            return []
        *batch, queries, keys = (
            self._small_size(a) for a in (*self.segments.batch, *self.roles.queries, *self.roles.keys)
        )
        shape = int(np.prod(batch)), queries, keys
        sizes = {"queries": queries, "keys": keys}

        def whole(row: Row, side: str) -> np.ndarray:
            return np.broadcast_to(rows[row.key], (*batch, sizes[side])).reshape(-1, sizes[side])

        found = []
        for term in self.segments.terms:
            if term.kind == "equal":
                each = whole(term.rows[0], "queries")[:, :, None] == whole(term.rows[1], "keys")[:, None]
            else:
                x = whole(term.rows[0], term.kind) == term.is_positive
                each = x[:, None] if term.kind == "keys" else x[:, :, None]
            found.append(np.broadcast_to(each, shape))
        return found
