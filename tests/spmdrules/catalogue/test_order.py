"""Compares the catalogue's sorting functions and its linear recurrence with NumPy."""

import numpy as np

from autoshard.spmdrules.catalogue import order
from tests.spmdrules.catalogue.compiled import compiled

ops = compiled(order)

RNG = np.random.default_rng(0)
TIES, MORE = RNG.integers(0, 3, (2, 4, 9)).astype(np.int32)
X = RNG.normal(size=(4, 9)).astype(np.float32)


def test_sort_pairs_breaks_ties_by_the_second_key():
    order = np.lexsort([MORE, TIES], axis=1)
    for actual, x in zip(ops.sort_pairs(TIES, MORE, X), (TIES, MORE, X), strict=True):
        np.testing.assert_array_equal(actual, np.take_along_axis(x, order, 1))


def test_lex_order():
    np.testing.assert_array_equal(ops.lex_order(TIES, MORE), np.lexsort([TIES, MORE], axis=1))


def test_kth_value_counts_from_one():
    np.testing.assert_array_equal(ops.kth_value(X, 1, 1), X.min(1))
    np.testing.assert_array_equal(ops.kth_value(X, 5, 1), np.median(X, 1))


def test_linear_recurrence():
    decay, state = RNG.uniform(0.2, 1.0, X.shape).astype(np.float32), np.zeros(4, np.float32)
    actual = np.asarray(ops.linear_recurrence(decay, X))
    for t in range(9):
        state = decay[:, t] * state + X[:, t]
        np.testing.assert_allclose(actual[:, t], state, rtol=1e-5, atol=1e-6)
