"""The dimensions of a recognised attention, and the transposes and reshapes between its arrays and a kernel's.

    q, d_q        [batch, queries, kv_heads, group, head_dim]
    k, d_k        [batch, keys, kv_heads, head_dim]
    v, d_v        [batch, keys, kv_heads, features]
    out, d_out    [batch, queries, kv_heads, group, features]

A dimension of size 1 is in no group. If there are several batch dimensions, those of size 1 included, the last one is
`kv_heads`. If only q has several further dimensions, `queries` is the one on which the mask depends, or without such a
mask the largest; the others are `group`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown
from autoshard.sharding.rewrite.attention_forward import Candidate, dimension_numbers
from autoshard.sharding.rewrite.masks.array_masks import Row
from autoshard.sharding.rewrite.masks.static_masks import used_dims
from autoshard.sharding.rewrite.shrinking import Axes, SmallShapes
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Value


@shown
@dataclass(frozen=True)
class Fold:
    """The transpose and reshape that turn an array of the program into a kernel's array.

    Attributes:
        groups: for each dimension of the kernel's array, the dimensions of the program's array that are merged into it,
            major to minor.

    >>> Fold(((0,), (2, 1))).fold(np.zeros((2, 3, 4))).shape
    (2, 12)
    """

    groups: tuple[tuple[int, ...], ...]

    def order(self, rank: int) -> list[int]:
        """Return all dimensions in the kernel's order. Those in no group, of size 1, come first."""
        used = [d for group in self.groups for d in group]
        return [*(d for d in range(rank) if d not in used), *used]

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the kernel's array."""
        return tuple(math.prod(shape[d] for d in group) for group in self.groups)

    def fold(self, x: Any, xp: Any = jnp) -> Any:
        """Return the kernel's array. `xp` is `jax.numpy` or NumPy."""
        return xp.reshape(xp.transpose(x, self.order(x.ndim)), self.sizes(x.shape))

    def unfold(self, x: Any, shape: Sequence[int]) -> Any:
        """Return the array of this shape whose `fold` is `x`."""
        order = self.order(len(shape))
        return jnp.transpose(jnp.reshape(x, [shape[d] for d in order]), np.argsort(order).tolist())


@shown
@dataclass(frozen=True)
class Roles:
    """The axes of an attention, by role; `()` where there is none.

    Attributes:
        batch, heads, queries, group, keys, head_dim, features: axes of the dimensions, major to minor.
    """

    batch: tuple[Axes, ...]
    heads: tuple[Axes, ...]
    queries: tuple[Axes, ...]
    group: tuple[Axes, ...]
    keys: tuple[Axes, ...]
    head_dim: tuple[Axes, ...]
    features: tuple[Axes, ...]

    def fold_of(self, shapes: SmallShapes, value: Value, kind: str) -> Fold:
        """Return the fold of an array that has the dimensions of `q`, `k`, `v` or `out`.

        Raises:
            Refused: the array has other dimensions, or they cannot be told apart.
        """
        roles = {
            "q": (self.batch, self.queries, self.heads, self.group, self.head_dim),
            "k": (self.batch, self.keys, self.heads, self.head_dim),
            "v": (self.batch, self.keys, self.heads, self.features),
            "out": (self.batch, self.queries, self.heads, self.group, self.features),
        }[kind]
        axes = shapes.axes[value]
        places = {dim: d for d, dim in enumerate(axes) if dim}
        wanted = [dim for role in roles for dim in role]
        if len(places) != sum(map(bool, axes)) or sorted(places) != sorted(wanted):
            raise Refused(f"the dimensions of {kind} cannot be told apart: {value.aval.dtype}{list(value.shape)}")
        return Fold(tuple(tuple(places[dim] for dim in role) for role in roles))


def sides_of(found: Candidate, shapes: SmallShapes) -> tuple[frozenset[Axes], frozenset[Axes], Axes]:
    """Return the axes that queries and keys share, the other ones of the queries, and the axis of the keys."""
    contracted, batch, free = dimension_numbers(found.scores, found.query_side)
    keys = shapes.axes[found.k][dimension_numbers(found.scores, 1 - found.query_side)[2][0]]
    of_query = shapes.axes[found.q]
    return frozenset(of_query[d] for d in batch), frozenset(of_query[d] for d in free), keys


def roles_of(found: Candidate, shapes: SmallShapes, masks: Sequence[Value], rows: Sequence[Row]) -> Roles:
    """Find which dimensions of a recognised attention are batch, heads, queries, keys and so on.

    Args:
        found: the attention.
        shapes: the axes of its values.
        masks: the static arrays that are not one number.
        rows: the other arrays of which its mask is made.

    Raises:
        Refused: a mask depends on a dimension other than the queries and the keys, or an array also on the heads.
    """
    axes = shapes.axes
    contracted, batch, free = dimension_numbers(found.scores, found.query_side)
    keys = axes[found.k][dimension_numbers(found.scores, 1 - found.query_side)[2][0]]
    features = [axes[found.v][d] for d in dimension_numbers(found.product, 1 - found.weight_side)[2]]
    of_batch, of_free = [axes[found.q][d] for d in batch], [axes[found.q][d] for d in free]
    of_rows = {each for row in rows for each in row.axes}
    masked = {axes[mask][d] for mask in masks for d in used_dims(mask)} - {keys, ()}
    if len(masked) > 1 or not masked <= {*of_free}:
        raise Refused(
            "a constant array of the scores, such as ALiBi's bias, differs between rows of the batch or heads"
        )
    masked |= of_rows & {*of_free}
    if len(masked) > 1:
        raise Refused("its mask depends on more dimensions than one of the queries")
    shared = [dim for dim in of_batch if dim not in of_rows]
    if len(of_batch) > 1 and not shared:
        raise Refused("its mask differs between heads")
    has_heads = len(of_batch) > 1 or _ends_with_heads(found)
    heads = shared[-1:] if has_heads else []
    sizes = {axes[found.q][d]: found.q.shape[d] for d in free}
    queries = next(iter(masked)) if masked else max(of_free, key=lambda dim: sizes[dim])
    return Roles(
        batch=tuple(dim for dim in of_batch if dim not in heads),
        heads=tuple(heads),
        queries=(queries,),
        group=tuple(dim for dim in of_free if dim != queries),
        keys=(keys,),
        head_dim=tuple(axes[found.q][d] for d in contracted),
        features=tuple(features),
    )


def _ends_with_heads(found: Candidate) -> bool:
    """Whether the last batch dimension of the scores follows others, which have size 1 if the batch has one row."""
    _, batch = found.scores.eqn.params["dimension_numbers"]
    dims = batch[found.query_side]
    return len(dims) > 1 and found.q.shape[dims[-1]] > 1


def mask_dims(roles: Roles, shapes: SmallShapes, mask: Value) -> tuple[int | None, int | None]:
    """Return which dimensions of a static array are those of queries and of keys; None where it has none."""
    (queries,), (keys,) = roles.queries, roles.keys
    axes = shapes.axes[mask]
    return axes.index(queries) if queries in axes else None, axes.index(keys) if keys in axes else None
