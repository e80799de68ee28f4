"""Compares the catalogue's reductions that are not in JAX with NumPy and SciPy."""

import numpy as np
import pytest

from autoshard.spmdrules.catalogue import reduction
from tests.spmdrules.catalogue.compiled import compiled

ops = compiled(reduction)

X, Y = np.random.default_rng(0).gamma(2.0, size=(2, 4, 9, 3)).astype(np.float32) - 1


def test_distance(strict_numerics):
    np.testing.assert_allclose(ops.distance(X, Y), np.linalg.norm((X - Y).ravel()), rtol=1e-6)


def test_cosine_similarity(strict_numerics):
    expected = np.einsum("ijk,ijk->ik", X, Y) / np.sqrt(np.einsum("ijk,ijk->ik", X, X) * np.einsum("ijk,ijk->ik", Y, Y))
    np.testing.assert_allclose(ops.cosine_similarity(X, Y, 1), expected, rtol=1e-5)
    np.testing.assert_array_equal(ops.cosine_similarity(np.zeros_like(X), Y, 1), np.zeros((4, 3)))


@pytest.mark.parametrize("order", [3, 4])
def test_standardized_moment(order):
    from scipy import stats  # takes a second

    expected = stats.skew(X, 1) if order == 3 else stats.kurtosis(X, 1, fisher=False)
    np.testing.assert_allclose(ops.standardized_moment(X, order, 1), expected, rtol=2e-5, atol=1e-6)


def test_var_mean():
    for actual, expected in zip(ops.var_mean(X, 1), (X.var(1), X.mean(1)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("order", [1, 3, np.inf])
def test_order_norm(order):
    np.testing.assert_allclose(ops.order_norm(X, order, 1), np.linalg.norm(X, order, 1), rtol=1e-5)


def test_weighted_average():
    weights = np.arange(1, 10, dtype=np.float32)
    np.testing.assert_allclose(ops.weighted_average(X, weights), np.average(X, 1, weights), rtol=1e-5)
