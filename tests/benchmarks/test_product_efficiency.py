"""The efficiency of products in compiled train steps, and the constant that is taken from it."""

import jax
import jax.numpy as jnp
import pytest
from product_efficiency import BLOCKS, CASES, LAYERS, PATH, Row, case_of, gradients, medians, shapes
from stored_rows import stored

from autoshard.sharding.machines.chips import CHIPS


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_have_gradients_for_all_weights(block):
    weights = [[jnp.ones(shape) / 8 for shape in shapes(block, 8)]] * LAYERS
    found = gradients(block)(weights, jax.random.normal(jax.random.key(0), (2, 4, 8)))
    assert all(jnp.abs(each).max() > 0 for each in jax.tree.leaves(found))


def test_the_efficiency_of_v5e_is_the_median_of_the_stored_rows():
    rows = stored(PATH, Row)
    assert {case_of(row) for row in rows} == set(CASES)
    assert CHIPS["v5e"].efficiency == pytest.approx(medians(rows)["v5e:2x2", "bfloat16"], abs=5e-4)
