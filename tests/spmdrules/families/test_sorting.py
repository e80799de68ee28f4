"""The table of operators that sort elements."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.spmdrules.rows import Row, f32

X = f32(4, 16)
_PICKED = "a w -> a w1, a w1; whole w w1"

ROWS = [
    Row("sort", lambda x: jnp.sort(x, 1), (X,), "a w -> a w; whole w"),
    Row("sort", lambda x, y: lax.sort((x, y), dimension=0), (X, X), "w a, w a -> w a, w a; whole w", "two"),
    Row("top_k", lambda x: lax.top_k(x, 3), (X,), _PICKED),
    Row("top_k", lambda x: lax.top_k(x, 1), (X,), "a w -> a 1, a 1; whole w", "one"),
    Row("approx_top_k", lambda x: lax.approx_max_k(x, 3), (X,), _PICKED),
    Row("approx_top_k", lambda x: lax.approx_max_k(x, 3, aggregate_to_topk=False), (X,), _PICKED, "unaggregated"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected
