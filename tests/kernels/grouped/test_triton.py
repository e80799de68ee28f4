"""The Triton kernels of grouped products, interpreted by Pallas: their blocks, and the rows at the edges of groups."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.kernels.grouped import triton
from autoshard.kernels.grouped.triton import Blocks, blocks_of_rows, gradient_blocks, product_blocks
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from tests.arrays import array

COST = KernelCost(1.0, 2, 3.0)
BLOCKS = Blocks(16, 16, 16)
STARTS, ENDS = jnp.asarray([5, 5, 30], jnp.int32), jnp.asarray([5, 30, 41], jnp.int32)  # the first group is empty


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [array(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("choose", "inner", "columns", "expected"),
    [
        (product_blocks, 14336, 4096, Blocks(128, 256, 64)),
        (product_blocks, 48, 96, Blocks(128, 32, 16)),
        (gradient_blocks, 48, 96, Blocks(16, 32, 64)),
        (product_blocks, 24, 96, None),
        (product_blocks, 96, 24, None),
        (gradient_blocks, 24, 96, None),
    ],
)
def test_blocks_are_powers_of_2_that_divide_the_matrix(choose, inner, columns, expected):
    assert choose(inner, columns) == expected


def test_each_row_is_in_one_block_of_its_group():
    count, visits = 50, blocks_of_rows(50, 3, 16)
    group, first, end, steps = (np.asarray(x) for x in triton._table(STARTS, ENDS, count, visits, BLOCKS, 64))
    owner = np.full(count, -2)
    for visit in range(visits):
        rows = slice(first[visit], min(first[visit] + 16, end[visit]))
        assert (owner[rows] == -2).all()
        owner[rows] = group[visit] if steps[visit] else -1
    assert owner.tolist() == [-1] * 5 + [1] * 25 + [2] * 11 + [-1] * 9 and set(steps) == {0, 4}


@pytest.mark.parametrize(("along", "across"), [(11, 3), (8, 1), (5, 4)])
def test_each_block_has_one_program(along, across):
    places = {tuple(map(int, triton._place(number, along, across))) for number in range(along * across)}
    assert places == {(row, column) for row in range(along) for column in range(across)}


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_outside_of_all_groups_are_zero_and_reach_no_other_row(transposed, monkeypatch):
    """Programs run in any order on a GPU. Here they run backwards, so no block hides what one before it wrote."""
    monkeypatch.setattr(triton, "_place", lambda number, along, across: (along - 1 - number // across, number % across))
    rows, weights, d_out = arrays((50, 32), (3, 32, 48), (50, 48))
    outside = jnp.asarray([not 5 <= row < 41 for row in range(50)])[:, None]
    expected = np.zeros((50, 48))
    for group, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        expected[start:end] = rows[start:end] @ weights[group]
    spoiled, d_spoiled = (jnp.where(outside, jnp.nan, x) for x in (rows, d_out))
    given = weights.swapaxes(1, 2) if transposed else weights
    options = {"blocks": BLOCKS, "cost": COST, "interpret": True}
    found = triton.triton_product(spoiled, given, STARTS, ENDS, transposed=transposed, **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    if not transposed:
        d_weights = triton.triton_gradient(spoiled, d_spoiled, STARTS, ENDS, **options)
        sums = [rows[start:end].T @ d_out[start:end] for start, end in zip(STARTS, ENDS, strict=True)]
        np.testing.assert_allclose(d_weights, np.stack(sums), atol=1e-5)
