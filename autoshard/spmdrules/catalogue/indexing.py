"""Reads and writes by position: tables, gathers, scatters, segments, and windows whose start is computed at run time.

Operators that overwrite get distinct sample positions, since the order of two writes to one position is undefined.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32


def embedding(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table: [vocab, embed], [batch, seq] -> [batch, seq, embed]."""
    return jnp.take(table, ids, axis=0)


def embedding_bag(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Sums of rows of a table: [vocab, embed], [batch, bag] -> [batch, embed]."""
    return jnp.take(table, ids, axis=0).sum(1)


def gather_nd(x: jax.Array, positions: jax.Array) -> jax.Array:
    """`x` at positions `[..., k]`, each an index into the first k dimensions of `x`."""
    return x[tuple(jnp.moveaxis(positions, -1, 0))]


def scatter(x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with the given rows set to `values`."""
    return x.at[rows].set(values)


def scatter_with(x: jax.Array, rows: jax.Array, values: jax.Array, method: str) -> jax.Array:
    """`x` with the given rows combined with `values` by a method of `x.at[rows]`: add, multiply, min, max."""
    return getattr(x.at[rows], method)(values)


def scatter_nd(positions: jax.Array, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros with `values` added at positions (see `gather_nd`)."""
    return scatter_nd_add(jnp.zeros(shape, values.dtype), positions, values)


def scatter_nd_add(x: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values` added at positions (see `gather_nd`)."""
    return x.at[tuple(jnp.moveaxis(positions, -1, 0))].add(values)


def index_put(x: jax.Array, rows: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values` set at pairs of row and column."""
    return x.at[rows, columns].set(values)


def index_put_accumulate(x: jax.Array, rows: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values` added at pairs of row and column. Values of equal pairs accumulate."""
    return x.at[rows, columns].add(values)


def index_add(x: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values` added to the given columns."""
    return x.at[:, columns].add(values)


def index_copy(x: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with the given columns set to `values`."""
    return x.at[:, columns].set(values)


def index_fill(x: jax.Array, columns: jax.Array, value: float = 2.0) -> jax.Array:
    """`x` with the given columns set to one value."""
    return x.at[:, columns].set(value)


def put_along_axis(x: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values` set at the given positions of each row."""
    return jax.vmap(scatter)(x, positions, values)


def put_along_axis_add(x: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """`x` with `values` added at the given positions of each row."""
    return jax.vmap(partial(scatter_with, method="add"))(x, positions, values)


def masked_fill(x: jax.Array, mask: jax.Array, value: jax.Array) -> jax.Array:
    """`x` with one value where the mask is true."""
    return jnp.where(mask, value, x)


def masked_select(x: jax.Array, mask: jax.Array, size: int) -> jax.Array:
    """The first `size` rows of `x` where the mask is true, padded with zeros."""
    (rows,) = jnp.nonzero(mask, size=size, fill_value=x.shape[0])
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def choose(first: jax.Array, second: jax.Array, third: jax.Array, which: jax.Array) -> jax.Array:
    """Selects from three arrays, element by element, by the index `which`."""
    return jnp.choose(which, [first, second, third], mode="clip")


def piecewise(x: jax.Array) -> jax.Array:
    """`jnp.select` with two conditions and a default."""
    return jnp.select([x < -0.5, x > 0.5], [jnp.square(x), -x], 3 * x)


def segment_mean(x: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """The mean of the rows of each segment, zero for a segment without rows."""
    rows = jax.ops.segment_sum(jnp.ones(segments.shape, x.dtype), segments, count)
    return jax.ops.segment_sum(x, segments, count) / jnp.maximum(rows, 1)[:, None]


def segment_softmax(x: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Softmax over the rows of each segment, as in attention over the edges of a graph."""
    largest = jax.ops.segment_max(lax.stop_gradient(x), segments, count)
    exponentials = jnp.exp(x - largest[segments])
    return exponentials / jax.ops.segment_sum(exponentials, segments, count)[segments]


def batched_dynamic_slice(x: jax.Array, starts: jax.Array, size: int) -> jax.Array:
    """Takes a window from each row of a batch, at that row's own start."""
    return jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, size))(x, starts)


def batched_dynamic_update_slice(x: jax.Array, update: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes an update into each row of a batch, at that row's own start, as in a key-value cache."""
    return jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))(x, update, starts)


def histogram(x: jax.Array, bins: int, low: float, high: float) -> jax.Array:
    """Counts the elements in each of `bins` equal intervals of a range."""
    return jnp.histogram(x, bins, (low, high))[0]


def _below(top: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Random positions below `top`. The last equals the first, so that one position occurs twice."""
    positions = np.random.default_rng(seed).integers(0, top, shape).astype(np.int32)
    positions.flat[-1] = positions.flat[0]
    return positions


def _distinct(top: int, *shape: int) -> np.ndarray:
    """Random positions below `top`, distinct within each row."""
    rng = np.random.default_rng(1)
    rows = [rng.permutation(top)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))]
    return np.array(rows, np.int32).reshape(shape)


_TABLE, _X = f32(16, 12), f32(4, 8, 12)
_ROWS = _below(16, 8)
_PAIRS = np.stack([_below(16, 8, seed=3), _below(12, 8, seed=4)], -1)
_PAIRS[5] = _PAIRS[2]
_PAIR_ROWS, _PAIR_COLUMNS = np.array([0, 0, 3, 3, 9, 9, 15, 15], np.int32), np.array([1, 5] * 4, np.int32)
_SEGMENTS = np.array([0, 3, 3, 1, 0, 7, 7, 7, 2, 2, 0, 5, 5, 1, 3, 0], np.int32)  # segments 4 and 6 have no rows
_SORTED = np.sort(np.random.default_rng(5).normal(size=16)).astype(np.float32)
_MASK = np.random.default_rng(6).uniform(size=16) < 0.5
_NOT_SMOOTH = "no gradient: positions or counts"
_DISTINCT = "positions are distinct"


def _at(start: int) -> Any:
    return np.asarray(start, np.int32)


_READING = (
    Operator("embedding", embedding, (_TABLE, _below(16, 4, 8))),
    Operator("embedding_bag", embedding_bag, (_TABLE, _below(16, 4, 8))),
    Operator("take", jnp.take, (_TABLE, _below(192, 8, seed=8)), note="indexes the flattened table"),
    Operator("gather", partial(jnp.take, axis=0, mode="clip"), (_TABLE, _ROWS)),
    Operator("index_select", partial(jnp.take, axis=1), (f32(4, 16), _ROWS)),
    Operator("gather_nd", gather_nd, (_TABLE, _PAIRS)),
    Operator("take_along_axis", partial(jnp.take_along_axis, axis=1), (f32(4, 16), _below(16, 4, 8))),
    Operator("dynamic_slice", partial(lax.dynamic_slice_in_dim, slice_size=3, axis=1), (_X, _at(2))),
    Operator("dynamic_index", partial(lax.dynamic_index_in_dim, axis=1, keepdims=False), (_X, _at(5))),
    Operator("batched_dynamic_slice", partial(batched_dynamic_slice, size=3), (_X, _below(5, 4))),
    Operator("masked_select", partial(masked_select, size=8), (_TABLE, _MASK)),
    Operator("choose", choose, (f32(4, 8), f32(4, 8), f32(4, 8), _below(3, 4, 8)), (0, 1, 2)),
    Operator("select", piecewise, (f32(4, 8),)),
    Operator("interp", jnp.interp, (f32(4, 8), _SORTED, f32(16)), (0, 1, 2)),
)
_WRITING = (
    Operator("index_put", index_put, (_TABLE, _PAIR_ROWS, _PAIR_COLUMNS, f32(8)), (0, 3), "pairs are distinct"),
    Operator("index_put_accumulate", index_put_accumulate, (_TABLE, _PAIRS[:, 0], _PAIRS[:, 1], f32(8)), (0, 3)),
    Operator("index_add", index_add, (f32(4, 16), _ROWS, f32(4, 8)), (0, 2)),
    Operator("index_copy", index_copy, (f32(4, 16), _distinct(16, 1, 8)[0], f32(4, 8)), (0, 2), _DISTINCT),
    Operator("index_fill", index_fill, (f32(4, 16), _ROWS)),
    Operator("scatter", scatter, (_TABLE, _distinct(16, 1, 8)[0], f32(8, 12)), (0, 2), _DISTINCT),
    *(
        Operator(f"scatter_{name}", partial(scatter_with, method=name), (_TABLE, _ROWS, f32(8, 12)), (0, 2))
        for name in ("add", "min", "max")
    ),
    Operator(
        "scatter_multiply",
        partial(scatter_with, method="multiply"),
        (_TABLE, _ROWS, f32(8, 12)),
        (0,),
        "no gradient with respect to the values: JAX has one for distinct positions only",
    ),
    Operator("scatter_nd", partial(scatter_nd, shape=(16, 12)), (_PAIRS, f32(8)), (1,)),
    Operator("scatter_nd_add", scatter_nd_add, (_TABLE, _PAIRS, f32(8)), (0, 2)),
    Operator("put_along_axis", put_along_axis, (f32(4, 16), _distinct(16, 4, 8), f32(4, 8)), (0, 2), _DISTINCT),
    Operator("put_along_axis_add", put_along_axis_add, (f32(4, 16), _below(16, 4, 8), f32(4, 8)), (0, 2)),
    Operator("masked_fill", masked_fill, (f32(4, 16), _below(2, 4, 16).astype(bool), f32()), (0, 2)),
    Operator(
        "dynamic_update_slice", partial(lax.dynamic_update_slice_in_dim, axis=1), (_X, f32(4, 3, 12), _at(2)), (0, 1)
    ),
    Operator("batched_dynamic_update_slice", batched_dynamic_update_slice, (_X, f32(4, 3, 12), _below(5, 4)), (0, 1)),
)
_SEGMENTED = (
    *(
        Operator(f"segment_{name}", partial(fn, num_segments=8), (f32(16, 12), _SEGMENTS))
        for name, fn in {
            "sum": jax.ops.segment_sum,
            "max": jax.ops.segment_max,
            "min": jax.ops.segment_min,
        }.items()
    ),
    Operator(
        "segment_prod",
        partial(jax.ops.segment_prod, num_segments=8),
        (f32(16, 12), _SEGMENTS),
        (),
        "no gradient: JAX has one for distinct positions only",
    ),
    Operator("segment_mean", partial(segment_mean, count=8), (f32(16, 12), _SEGMENTS)),
    Operator("segment_softmax", partial(segment_softmax, count=8), (f32(16, 12), _SEGMENTS)),
)
_COUNTING = (
    Operator("one_hot", partial(jax.nn.one_hot, num_classes=16), (_below(16, 4, 8),), (), _NOT_SMOOTH),
    Operator("bincount", partial(jnp.bincount, length=16), (_below(16, 32),), (), _NOT_SMOOTH),
    Operator("histogram", partial(histogram, bins=8, low=-2.0, high=2.0), (f32(16, 12),), (), _NOT_SMOOTH),
    Operator("searchsorted", jnp.searchsorted, (_SORTED, f32(4, 8)), (), _NOT_SMOOTH),
    Operator("bucketize", jnp.digitize, (f32(4, 8), _SORTED), (), _NOT_SMOOTH),
    Operator("nonzero", partial(jnp.nonzero, size=8, fill_value=16), (_MASK,), (), _NOT_SMOOTH),
)
OPERATORS: tuple[Operator, ...] = (*_READING, *_WRITING, *_SEGMENTED, *_COUNTING)
