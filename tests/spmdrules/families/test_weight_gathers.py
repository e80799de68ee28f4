"""The table of the gather of weights before a loop."""

import jax.numpy as jnp
import pytest

from autoshard.spmdrules.families.weight_gathers import gather_before_loop, gather_once, reduce_after_loop
from tests.spmdrules.rows import Row, f32

ROWS = [
    Row("gather_once", gather_once, (f32(4, 8),), "a b -> a b; linear 0"),
    Row("gather_before_loop", gather_before_loop, (f32(4, 8),), "a b -> a b; linear 0"),
    Row("reduce_after_loop", reduce_after_loop, (f32(4, 8),), "a b -> a b; linear 0"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


@pytest.mark.parametrize("operator", [gather_once, gather_before_loop, reduce_after_loop])
def test_values_stay(operator):
    assert operator(jnp.arange(3)).tolist() == [0, 1, 2]
