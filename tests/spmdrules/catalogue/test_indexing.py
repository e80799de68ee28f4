"""Compares the catalogue's functions that read and write by position with NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.spmdrules.catalogue import indexing
from tests.spmdrules.catalogue.compiled import compiled

ops = compiled(indexing)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype(np.float32)
ROWS, DISTINCT = np.array([0, 3, 3, 5]), np.array([4, 0, 3, 1])
PAIRS = np.array([[0, 1], [3, 4], [3, 4], [5, 0]])
V, BLOCK = RNG.normal(size=4).astype(np.float32), RNG.normal(size=(4, 5)).astype(np.float32)
ARRAY = jnp.asarray(X)


def put(x, index, values):
    updated = x.copy()
    updated[index] = values
    return updated


def ufunc_at(ufunc, x, index, values):
    updated = x.copy()
    ufunc.at(updated, index, values)
    return updated


def test_embeddings():
    ids = np.array([[0, 5, 5], [1, 1, 1]])
    np.testing.assert_array_equal(ops.embedding(ARRAY, ids), X[ids])
    np.testing.assert_allclose(ops.embedding_bag(ARRAY, ids), X[ids].sum(1), rtol=1e-6)


def test_gather_nd_addresses_leading_dimensions():
    np.testing.assert_array_equal(ops.gather_nd(ARRAY, PAIRS), X[PAIRS[:, 0], PAIRS[:, 1]])
    np.testing.assert_array_equal(ops.gather_nd(ARRAY, PAIRS[:, :1]), X[PAIRS[:, 0]])


@pytest.mark.parametrize(
    ("method", "ufunc"), [("add", np.add), ("multiply", np.multiply), ("min", np.minimum), ("max", np.maximum)]
)
def test_scatter_with(method, ufunc):
    expected = ufunc_at(ufunc, X, ROWS, BLOCK)
    np.testing.assert_allclose(ops.scatter_with(ARRAY, ROWS, BLOCK, method), expected, rtol=1e-6)


def test_values_at_equal_pairs_accumulate():
    index = (PAIRS[:, 0], PAIRS[:, 1])
    added, alone = ufunc_at(np.add, X, index, V), ufunc_at(np.add, np.zeros_like(X), index, V)
    np.testing.assert_allclose(ops.index_put_accumulate(ARRAY, *index, V), added, rtol=1e-6)
    np.testing.assert_allclose(ops.scatter_nd_add(ARRAY, PAIRS, V), added, rtol=1e-6)
    np.testing.assert_allclose(ops.scatter_nd(PAIRS, V, X.shape), alone, rtol=1e-6)


def test_overwriting():
    np.testing.assert_array_equal(ops.scatter(ARRAY, DISTINCT, BLOCK), put(X, DISTINCT, BLOCK))
    pairs = (ROWS, np.arange(4))
    np.testing.assert_array_equal(ops.index_put(ARRAY, *pairs, V), put(X, pairs, V))


def test_columns():
    columns, values = np.array([2, 0, 2]), RNG.normal(size=(6, 3)).astype(np.float32)
    added = ufunc_at(np.add, X, np.s_[:, columns], values)
    np.testing.assert_allclose(ops.index_add(ARRAY, columns, values), added, rtol=1e-6)
    np.testing.assert_array_equal(ops.index_fill(ARRAY, columns, 7.0), put(X, np.s_[:, columns], 7))
    np.testing.assert_array_equal(
        ops.index_copy(ARRAY, columns[:2], values[:, :2]), put(X, np.s_[:, columns[:2]], values[:, :2])
    )


def test_along_an_axis():
    distinct = np.argsort(RNG.normal(size=(6, 5)), 1)[:, :3]
    values = RNG.normal(size=(6, 3)).astype(np.float32)
    rows = np.arange(6)[:, None]
    np.testing.assert_array_equal(ops.put_along_axis(ARRAY, distinct, values), put(X, (rows, distinct), values))
    repeated = np.where(distinct > 2, 2, distinct)
    added = ufunc_at(np.add, X, (rows, repeated), values)
    np.testing.assert_allclose(ops.put_along_axis_add(ARRAY, repeated, values), added, rtol=1e-6)


def test_masks():
    mask = np.array([0, 1, 1, 0, 0, 1], bool)
    np.testing.assert_array_equal(ops.masked_fill(ARRAY, X > 0, jnp.float32(9)), np.where(X > 0, 9, X))
    np.testing.assert_array_equal(ops.masked_select(ARRAY, mask, 2), X[[1, 2]])
    np.testing.assert_array_equal(ops.masked_select(ARRAY, mask, 4), [*X[mask], np.zeros(5)])


def test_choices():
    which = RNG.integers(0, 3, X.shape)
    np.testing.assert_array_equal(ops.choose(ARRAY, 2 * ARRAY, -ARRAY, which), np.choose(which, [X, 2 * X, -X]))
    expected = np.where(X < -0.5, X**2, np.where(X > 0.5, -X, 3 * X))
    np.testing.assert_allclose(ops.piecewise(ARRAY), expected, rtol=1e-6)


def test_segments_without_rows_are_zero():
    segments = np.array([0, 2, 2, 0, 2, 4])
    expected = [X[segments == i].mean(0) if (segments == i).any() else np.zeros(5) for i in range(5)]
    np.testing.assert_allclose(ops.segment_mean(ARRAY, segments, 5), expected, rtol=1e-6)


def test_segment_softmax_sums_to_one_in_each_segment():
    segments = np.array([0, 2, 2, 0, 2, 4])
    actual = np.asarray(ops.segment_softmax(100 * ARRAY, segments, 5))
    for i in (0, 2, 4):
        rows = 100 * X[segments == i].astype(np.float64)
        weights = np.exp(rows - rows.max(0))
        np.testing.assert_allclose(actual[segments == i], weights / weights.sum(0), rtol=1e-4, atol=1e-7)


def test_windows_with_one_start_per_row():
    starts, update = np.array([0, 2, 1, 1, 0, 2]), RNG.normal(size=(6, 3)).astype(np.float32)
    columns = starts[:, None] + np.arange(3)
    rows = np.arange(6)[:, None]
    np.testing.assert_array_equal(ops.batched_dynamic_slice(ARRAY, starts, 3), X[rows, columns])
    np.testing.assert_array_equal(
        ops.batched_dynamic_update_slice(ARRAY, update, starts), put(X, (rows, columns), update)
    )


def test_histogram():
    np.testing.assert_array_equal(ops.histogram(ARRAY, 8, -2.0, 2.0), np.histogram(X, 8, (-2, 2))[0])
