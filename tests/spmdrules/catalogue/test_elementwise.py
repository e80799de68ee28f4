"""Compares the functions of the catalogue's elementwise operators with NumPy."""

from typing import Any

import numpy as np
import pytest

from autoshard.spmdrules.catalogue import elementwise

ops: Any = elementwise  # typed as Any, since the tests pass NumPy arrays

A, B, C = (np.random.default_rng(i).uniform(0.3, 2.0, (4, 6)).astype(np.float32) * (-1) ** i for i in range(3))


@pytest.mark.parametrize(
    ("function", "expected"),
    [(ops.lerp, A * (1 - C) + B * C), (ops.addcmul, A + np.multiply(B, C)), (ops.addcdiv, A + np.divide(B, C))],
)
def test_three_operands(function, expected, strict_numerics):
    np.testing.assert_allclose(function(A, B, C), expected, rtol=1e-5, atol=1e-6)


def test_polar(strict_numerics):
    np.testing.assert_allclose(ops.polar(A, B), A * np.exp(1j * B), rtol=1e-5)
