"""The rules of the operators by which devices exchange matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.spmdrules.families.stacked.matrices import collect_matrices, spread_matrices
from tests.spmdrules.rows import Row, f32

X, STACK = f32(4, 8), f32(2, 4, 8)

ROWS = [
    Row("spread_matrices", lambda x, y: spread_matrices([x, y], 2), (X, X), "a b, a b -> p a b; whole p; linear 0 1"),
    Row(
        "spread_matrices",
        lambda x, y: spread_matrices([x, y], 4),
        (X, X),
        "a b, a b -> p a b; whole p; linear 0 1",
        "copies",
    ),
    Row(
        "spread_matrices",
        lambda x, y: spread_matrices([x, y], 8, stacked=True),
        (STACK, f32(3, 4, 8)),
        "l0 a b, l1 a b -> p a b; whole l0 l1 p; linear 0 1",
        "stacks",
    ),
    Row(
        "collect_matrices",
        lambda x: collect_matrices(x, (1, 1)),
        (f32(3, 4, 8),),
        "p a b -> a b, a b; whole p; linear 0",
    ),
    Row(
        "collect_matrices",
        lambda x: collect_matrices(x, (2, 3), stacked=True),
        (f32(8, 4, 8),),
        "p a b -> l0 a b, l1 a b; whole p l0 l1; linear 0",
        "stacks",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


@pytest.mark.parametrize("places", [3, 4, 8])
def test_matrices_come_back(places):
    arrays = [jnp.full((2, 3), n) for n in range(3)]
    stack = spread_matrices(arrays, places)
    assert stack[:, 0, 0].tolist() == [0, 1, 2] + [0] * (places - 3)
    np.testing.assert_array_equal(jnp.stack(collect_matrices(stack, (1, 1, 1))), jnp.stack(arrays))


@pytest.mark.parametrize("places", [5, 8])
def test_stacks_come_back(places):
    arrays = [jnp.arange(2 * 3).reshape(2, 3), 10 + jnp.arange(3 * 3).reshape(3, 3)]
    stack = spread_matrices(arrays, places, stacked=True)
    assert stack.shape == (places, 3)
    for one, other in zip(collect_matrices(stack, (2, 3), stacked=True), arrays, strict=True):
        np.testing.assert_array_equal(one, other)
