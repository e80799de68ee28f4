"""Compares the catalogue's activations that are not in JAX with their definitions in NumPy."""

import numpy as np
import pytest

from autoshard.spmdrules.catalogue import activation
from tests.spmdrules.catalogue.compiled import compiled

ops = compiled(activation)

X = np.concatenate([np.linspace(-4, 4, 33), [0.5, -0.5, 0.1, 30.0, -30.0, 1e-3, -1e-3]]).astype(np.float32)
E = np.exp(X.astype(np.float64))
POSITIVE, NEGATIVE = np.maximum(X, 0), np.minimum(X, 0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ops.mish, X * np.tanh(np.log1p(E))),
        (ops.tanhshrink, X - np.tanh(X)),
        (ops.softshrink, np.where(X > 0.5, X - 0.5, np.where(X < -0.5, X + 0.5, 0))),
        (ops.hardshrink, np.where((X > 0.5) | (X < -0.5), X, 0)),
        (ops.threshold, np.where(X > np.float32(0.1), X, -1)),
        (ops.scaled_tanh, 1.7159 * np.tanh(0.67 * X)),
        (ops.quick_gelu, X / (1 + E**-1.702)),
        (ops.squared_relu, POSITIVE**2),
        (ops.log_cosh, np.log(np.cosh(X.astype(np.float64)))),
        (ops.gaussian, np.exp(-(X.astype(np.float64) ** 2))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_definition(function, expected, strict_numerics):
    np.testing.assert_allclose(function(X), expected, rtol=1e-5, atol=2e-6)


def test_log_cosh_does_not_overflow(strict_numerics):
    np.testing.assert_allclose(ops.log_cosh(np.array([1000, -1000], np.float32)), 1000 - np.log(2), rtol=1e-6)


def test_prelu_has_one_slope_per_channel():
    x = X.reshape(5, 8)
    slope = np.linspace(-1, 1, 8, dtype=np.float32)
    np.testing.assert_allclose(ops.prelu(x, slope), np.maximum(x, 0) + slope * np.minimum(x, 0), rtol=1e-6)


def test_maxout_groups_adjacent_channels(strict_numerics):
    x = np.array([[1, 5, -2, -3, 0, 7]], np.float32)
    np.testing.assert_array_equal(ops.maxout(x), [[5, -2, 7]])
    np.testing.assert_array_equal(ops.maxout(x, 3), [[5, 7]])


def test_crelu(strict_numerics):
    np.testing.assert_array_equal(ops.crelu(X[None]), [np.concatenate([POSITIVE, -NEGATIVE])])
