"""Two arrays of segments that are equal exactly where a conjunction of `equal`, `keys` and `queries` terms is true.

One `equal` term is its two arrays. Padding alone is three segments: visible, hidden queries, hidden keys. Otherwise the
arrays of the `equal` terms are replaced by their rank among all rows of queries and keys, so that any number stays free
for hidden rows, and several terms become one number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.sharding.rewrite.masks.array_masks import Row, Term, canonical
from autoshard.sharding.rewrite.shrinking import Axes
from autoshard.sharding.rewrite.values import Value

# Segments of hidden rows; ranks are at least 0.
_HIDDEN_QUERY, _HIDDEN_KEY = -1, -2
_VISIBLE = 0


@shown
@dataclass(frozen=True)
class SegmentMask:
    """A mask as a conjunction of terms.

    Attributes:
        terms: the terms, at least one.
        batch: the axes of the batch, major to minor.
        queries, keys: the axes of the positions.
        shape: sizes of the batch's axes, then the number of queries and of keys.
    """

    terms: tuple[Term, ...]
    batch: tuple[Axes, ...]
    queries: Axes
    keys: Axes
    shape: tuple[int, ...]

    @property
    def bases(self) -> tuple[Value, ...]:
        """The arrays of the program that `segments` takes."""
        return tuple(dict.fromkeys(row.base for term in self.terms for row in term.rows))

    @property
    def is_reflexive(self) -> bool:
        """Whether position n of the queries is always in the segment of position n of the keys."""
        return self.shape[-1] == self.shape[-2] and all(
            term.kind == "equal" and self._by_name(term.rows[0]) == self._by_name(term.rows[1]) for term in self.terms
        )

    def _by_name(self, row: Row) -> tuple[Value, tuple[Axes | str, ...]]:
        return row.base, tuple("position" if axes in (self.queries, self.keys) else axes for axes in row.base_index)

    def segments(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the segments of queries `[batch, queries]` and of keys `[batch, keys]`, int32.

        Args:
            *arrays: the arrays of `bases`.
        """
        given = dict(zip(self.bases, arrays, strict=True))

        def rows(row: Row, axis: Axes, size: int) -> jax.Array:
            x = canonical(row, given[row.base], self.batch, axis)
            x = jnp.broadcast_to(x, (*self.shape[:-2], size))
            return x.reshape(-1, size)

        *_, queries, keys = self.shape
        pairs = [
            (rows(t.rows[0], self.queries, queries), rows(t.rows[1], self.keys, keys))
            for t in self.terms if t.kind == "equal"
        ]  # fmt: skip
        padding = {kind: [rows(t.rows[0], axis, size) == t.is_positive for t in self.terms if t.kind == kind]
                   for kind, axis, size in (("queries", self.queries, queries), ("keys", self.keys, keys))}  # fmt: skip
        if len(pairs) == 1 and not any(padding.values()) and pairs[0][0].dtype.itemsize <= 4:
            of_queries, of_keys = (x.astype(jnp.int32) for x in pairs[0])
            return of_queries, of_keys
        batch = math.prod(self.shape[:-2])
        of_queries, of_keys = ranks(pairs) if pairs else (jnp.full((batch, n), _VISIBLE) for n in (queries, keys))
        for visible in padding["queries"]:
            of_queries = jnp.where(visible, of_queries, _HIDDEN_QUERY)
        for visible in padding["keys"]:
            of_keys = jnp.where(visible, of_keys, _HIDDEN_KEY)
        return of_queries.astype(jnp.int32), of_keys.astype(jnp.int32)


def ranks(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Return one number at least 0 for each row, equal for two rows of a sequence if they are equal in all pairs.

    Args:
        pairs: arrays of the queries `[batch, queries]` and of the keys `[batch, keys]`.

    >>> [x.tolist() for x in ranks([(jnp.array([[7, 9]]), jnp.array([[9, -3, 7]]))])]
    [[[1, 2]], [[2, 0, 1]]]
    """
    joined = [jnp.concatenate(pair, axis=1) for pair in pairs]
    position = lax.broadcasted_iota(jnp.int32, joined[0].shape, 1)
    *ordered, order = lax.sort([*joined, position], dimension=1, num_keys=len(joined))
    is_new = functools.reduce(jnp.logical_or, [x[:, 1:] != x[:, :-1] for x in ordered])
    rank = jnp.cumsum(jnp.pad(is_new, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)
    _, found = lax.sort([order, rank], dimension=1, num_keys=1)
    queries = pairs[0][0].shape[1]
    return found[:, :queries], found[:, queries:]
