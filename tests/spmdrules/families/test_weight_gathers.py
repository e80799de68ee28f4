"""The table of the operators that mark where collectives run."""

import functools

import jax.numpy as jnp
import pytest

from autoshard.spmdrules.families.weight_gathers import (
    gather_before_loop,
    gather_once,
    gather_rows,
    reduce_after_loop,
)
from tests.spmdrules.rows import Row, f32

ROWS = [
    Row("gather_once", gather_once, (f32(4, 8),), "a b -> a b; linear 0"),
    Row("gather_before_loop", gather_before_loop, (f32(4, 8),), "a b -> a b; linear 0"),
    Row("reduce_after_loop", reduce_after_loop, (f32(4, 8),), "a b -> a b; linear 0"),
    Row(
        "gather_rows",
        functools.partial(gather_rows, dim=0),
        (f32(4, 8),),
        "w b -> w1 b; whole w w1; linear 0; moves 0",
        unchecked="shards of the dimension would pass, but it is whole on purpose",
    ),  # fmt: skip
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


@pytest.mark.parametrize(
    "operator", [gather_once, gather_before_loop, reduce_after_loop, functools.partial(gather_rows, dim=0)]
)
def test_values_stay(operator):
    assert operator(jnp.arange(3)).tolist() == [0, 1, 2]
