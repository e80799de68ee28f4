"""Products with codes and scales of blocks: equal to products with the decoded weight, and read in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import check_rule
from autoshard.models.block_scales import block_product, decoded, joined_inputs, scaled_product, split_inputs

# spec, shape of x, shape of the weight, number of blocks in each dimension, dimensions of inputs and outputs
CASES = {
    "queries": ("bse,ehd->bshd", (2, 3, 24), (24, 4, 6), (6, 4, 1), 1, 2),
    "several heads a block": ("bse,ehd->bshd", (2, 3, 24), (24, 4, 6), (6, 2, 1), 1, 2),
    "several blocks a head": ("bse,ehd->bshd", (2, 3, 24), (24, 4, 6), (6, 4, 3), 1, 2),
    "outputs of heads": ("bshd,hde->bse", (2, 3, 4, 6), (4, 6, 24), (4, 1, 6), 2, 1),
    "blocks of heads": ("bshd,hde->bse", (2, 3, 4, 6), (4, 6, 24), (2, 1, 6), 2, 1),
    "one block": ("bse,ef->bsf", (2, 3, 8), (8, 10), (1, 1), 1, 1),
    "blocks of one": ("bse,ef->bsf", (2, 3, 8), (8, 10), (8, 10), 1, 1),
    "experts": ("etd,edf->etf", (5, 3, 8), (5, 8, 12), (5, 2, 3), 1, 1),
    "a sum over experts": ("etf,efd->td", (5, 3, 12), (5, 12, 8), (5, 3, 2), 1, 1),
}


def operands(case):
    """Return x, codes and scales of a case."""
    _, of_x, shape, counts, _, _ = CASES[case]
    keys = jax.random.split(jax.random.key(0), 3)
    codes = jax.random.normal(keys[1], shape).astype(jnp.float8_e4m3fn)
    return jax.random.normal(keys[0], of_x), codes, jax.random.uniform(keys[2], counts, minval=0.1)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_decoded_weight(case):
    spec, _, _, _, inputs, outputs = CASES[case]
    x, codes, scale = operands(case)
    split = split_inputs(codes, scale, inputs, outputs)
    assert split.ndim == codes.ndim + inputs
    np.testing.assert_array_equal(joined_inputs(split, scale, inputs, outputs), codes)
    expected = jnp.einsum(spec, x, decoded(codes, scale))
    assert np.abs(expected).max() > 1
    found = block_product(spec, x, split, scale, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # The codes are exact in bfloat16, and sums are in float32: the error is that of the result's last rounding.
    low = block_product(spec, x.astype(jnp.bfloat16), split, scale, inputs)
    rounded = jnp.einsum(spec, x.astype(jnp.bfloat16).astype(jnp.float32), decoded(codes, scale))
    np.testing.assert_allclose(low.astype(jnp.float32), rounded, rtol=2**-8, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["several heads a block", "outputs of heads", "one block"])
def test_a_product_is_an_operator_with_a_rule(case):
    spec, _, _, _, inputs, outputs = CASES[case]
    x, codes, scale = operands(case)
    x, codes = x[:1, :2], split_inputs(codes, scale, inputs, outputs)  # no more rows than a block has inputs
    product = functools.partial(scaled_product, spec, inputs=inputs)
    assert "scaled_product" in str(jax.make_jaxpr(product)(x, codes, scale))
    # The rule keeps the elements of a block together, although shards of them would give right results, too.
    assert [one for one in check_rule(product, x, codes, scale, partitioner=False) if one.kind == "wrong"] == []
    np.testing.assert_allclose(product(x, codes, scale), block_product(spec, x, codes, scale, inputs), rtol=1e-6)


def test_with_many_rows_the_weight_is_decoded():
    x, codes, scale = operands("queries")
    text = str(jax.make_jaxpr(functools.partial(scaled_product, "bse,ehd->bshd", inputs=1))(
        x, split_inputs(codes, scale, 1, 2), scale))  # fmt: skip
    assert "scaled_product" not in text
