"""Compares the catalogue's products and solvers that are not in JAX with NumPy."""

from typing import Any

import numpy as np

from autoshard.spmdrules.catalogue import linalg

ops: Any = linalg  # typed as Any, since the tests pass NumPy arrays

RNG = np.random.default_rng(0)
X, W, Y = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 6), (6, 5), (4, 5)))
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}


def test_products():
    bias, up = np.arange(5, dtype=np.float32), W[:2]
    np.testing.assert_allclose(ops.linear(X, W, bias), X @ W + bias, **CLOSE)
    np.testing.assert_allclose(ops.addmm(Y, X, W), Y + 0.5 * X @ W, **CLOSE)
    np.testing.assert_allclose(ops.low_rank_linear(X, W, W[:, :2], up), X @ (W + W[:, :2] @ up), **CLOSE)
    np.testing.assert_allclose(ops.einsum("ij,kj->ik")(X, X[1:]), X @ X[1:].T, **CLOSE)


def test_bilinear():
    forms = RNG.normal(size=(3, 6, 5)).astype(np.float32)
    expected = [[x @ form @ y for form in forms] for x, y in zip(X, Y, strict=True)]
    np.testing.assert_allclose(ops.bilinear(X, forms, Y), expected, **CLOSE)


def test_squared_distances():
    expected = ((X[:, None] - X[None, 1:]) ** 2).sum(-1)
    np.testing.assert_allclose(ops.squared_distances(X, X[1:]), expected, **CLOSE)


def test_least_squares():
    a, b = RNG.normal(size=(2, 9, 4)).astype(np.float32), RNG.normal(size=(2, 9, 3)).astype(np.float32)
    expected = [np.linalg.lstsq(m, v)[0] for m, v in zip(a, b, strict=True)]
    np.testing.assert_allclose(ops.least_squares(a, b), expected, **CLOSE)


def test_cholesky_solve():
    root = RNG.normal(size=(2, 5, 5)).astype(np.float32) + 3 * np.eye(5, dtype=np.float32)
    a, b = root @ root.swapaxes(1, 2), RNG.normal(size=(2, 5, 3)).astype(np.float32)
    np.testing.assert_allclose(ops.cholesky_solve(a, b), np.linalg.solve(a, b), **CLOSE)
