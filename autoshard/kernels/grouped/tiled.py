"""Grouped products in plain JAX: a loop over tiles of rows, each multiplied by the matrix of its group.

On CPUs and GPUs, XLA computes `lax.ragged_dot` and its gradients as one masked product of all rows for each group. Here
a tile is computed only for the groups that have rows in it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown


@shown
class Visits(NamedTuple):
    """Which tiles are visited for which group, in order.

    Attributes:
        starts: first row of each group, int32 `[groups]`.
        ends: the row after the last one of each group.
        first: number of the first visit of each group.
        count: the number of visits.
    """

    starts: jax.Array
    ends: jax.Array
    first: jax.Array
    count: jax.Array


def visits_of(starts: jax.Array, ends: jax.Array, tile: int) -> Visits:
    """Return the visits of consecutive groups of rows, `[starts[g], ends[g])`. Empty groups are not visited."""
    tiles = jnp.where(ends > starts, -(-ends // tile) - starts // tile, 0)
    after = jnp.cumsum(tiles, dtype=jnp.int32)
    return Visits(starts, ends, after - tiles, after[-1])


def group_of(visits: Visits, number: jax.Array) -> jax.Array:
    """Return the group of the visit with this number, or of visits with these numbers, int32.

    >>> visits = visits_of(jnp.array([0, 3, 3]), jnp.array([3, 3, 9]), 4)
    >>> visits.first.tolist(), group_of(visits, jnp.arange(4)).tolist()
    ([0, 1, 1], [0, 2, 2, 2])
    """
    # A group without visits has the same `first` as the next group, so the last group with this `first` is right.
    return jnp.searchsorted(visits.first, number, side="right", method="compare_all").astype(jnp.int32) - 1


def tiled_product(
    rows: jax.Array, weights: jax.Array, starts: jax.Array, ends: jax.Array, *, tile: int, transposed: bool
) -> jax.Array:
    """Return rows times the matrices of their groups, `[m, n]`; zeros in rows outside of all groups.

    Args:
        rows: `[m, k]`.
        weights: `[groups, k, n]`, or `[groups, n, k]` if `transposed`.
        starts: first row of each group, int32 `[groups]`.
        ends: the row after the last one of each group.
        tile: rows of a tile.
        transposed: whether the matrices are transposed.
    """
    count, columns = rows.shape[0], weights.shape[1 if transposed else 2]
    rows = with_whole_tiles(rows, tile)
    visits = visits_of(starts, ends, tile)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def visit(number: jax.Array, out: jax.Array) -> jax.Array:
        group, first, inside = _at(visits, number, tile)
        part = lax.dynamic_slice_in_dim(rows, first, tile)
        matrix = lax.dynamic_index_in_dim(weights, group, keepdims=False)
        found = lax.dot_general(part, matrix, contracted, preferred_element_type=rows.dtype)
        before = lax.dynamic_slice_in_dim(out, first, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(inside, found, before), first, 0)

    out = lax.fori_loop(0, visits.count, visit, jnp.zeros((rows.shape[0], columns), rows.dtype))
    return lax.slice_in_dim(out, 0, count)


def tiled_gradient(
    rows: jax.Array, d_out: jax.Array, starts: jax.Array, ends: jax.Array, *, tile: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Return the gradient of the matrices, `[groups, k, n]`; zeros for groups without rows.

    It is summed in float32, or in float64 if the rows are float64.

    Args:
        rows: `[m, k]`.
        d_out: cotangent of the product, `[m, n]`.
        starts: first row of each group, int32 `[groups]`.
        ends: the row after the last one of each group.
        tile: rows of a tile.
        dtype: the dtype of the result.
    """
    rows, d_out = with_whole_tiles(rows, tile), with_whole_tiles(d_out, tile)
    visits = visits_of(starts, ends, tile)
    wide = jnp.promote_types(rows.dtype, jnp.float32)

    def visit(number: jax.Array, total: jax.Array) -> jax.Array:
        group, first, inside = _at(visits, number, tile)
        # Both are zeroed: rows outside of all groups may hold anything.
        left, right = (jnp.where(inside, lax.dynamic_slice_in_dim(x, first, tile), 0) for x in (rows, d_out))
        found = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        before = lax.dynamic_index_in_dim(total, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, before + found, group, 0)

    total = jnp.zeros((starts.shape[0], rows.shape[1], d_out.shape[1]), wide)
    return lax.fori_loop(0, visits.count, visit, total).astype(dtype)


def _at(visits: Visits, number: jax.Array, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a visit's group, the first row of its tile, and which of the tile's rows are in the group, `[tile, 1]`."""
    group = group_of(visits, number)
    start, end = visits.starts[group], visits.ends[group]
    first = (start // tile + number - visits.first[group]) * tile
    row = first + lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    return group, first, (row >= start) & (row < end)


def with_whole_tiles(x: jax.Array, tile: int) -> jax.Array:
    """Return rows `[m, k]` with as many rows of zeros behind them as the last tile lacks.

    >>> with_whole_tiles(jnp.ones((5, 2)), 4).shape
    (8, 2)
    """
    missing = -x.shape[0] % tile
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x
