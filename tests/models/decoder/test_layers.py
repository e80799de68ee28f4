"""Attention of layers with a partial rotation, keys as values and lent keys, against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.models.decoder import DecoderConfig, LayerKind, Rotary
from autoshard.models.decoder.layers import Attention
from autoshard.models.decoder.stacks import make_sides
from tests.models.small import called

ROTARY = Rotary(base=100.0, fraction=0.5)
LENDER = LayerKind(rotary=ROTARY, keys_as_values=True, lends="a")
CONFIG = DecoderConfig(
    vocab=16, width=8, kinds=(LENDER, LayerKind(rotary=ROTARY, borrows="a")), heads=2, kv_heads=1, head_dim=4, ffn=16,
    context=32, query_norm=True, value_norm=True, score_scale=1.0, init_std=0.5,
)  # fmt: skip
X = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")


def sides():
    """The positions and mask of all tests."""
    return make_sides(CONFIG, jnp.arange(5)[None], None)


def unit(x):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + CONFIG.norm_eps)


def rotated(x):
    """Turns the first of the two pairs, elements 0 and 2, by an angle of 1 at each position."""
    first, still, second, other = np.moveaxis(x, -1, 0)
    angle = np.arange(5)[None, :, None]
    turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.stack([turned[0], still, turned[1], other], axis=-1)


def expected(attention, k, v):
    """Returns the result for these keys and values, `[batch, seq, 1, head_dim]`."""
    q = rotated(unit(np.einsum("bse,ehd->bshd", X, attention.wq[...])))
    scores = np.where(np.tri(5, dtype=bool), np.einsum("bshd,btd->bhst", q, k[:, :, 0]), -np.inf)
    weights = np.exp(scores) / np.sum(np.exp(scores), axis=-1, keepdims=True)
    return np.einsum("bhst,btd,hde->bse", weights, v[:, :, 0], attention.wo[...])


@pytest.fixture(scope="module")
def lent():
    lender = Attention(CONFIG, CONFIG.kinds[0], jax.random.key(0))
    assert lender.wk is not None
    keys = np.einsum("bse,ehd->bshd", X, lender.wk[...])
    return lender, rotated(unit(keys)), unit(keys)


def test_values_are_the_keys_before_these_are_normalised_and_rotated(lent):
    lender, k, v = lent
    y, kept = called(lender, lambda lender, x: lender.with_keys(x, sides()), X)
    assert lender.wv is None
    for found, right in zip((y, *kept), (expected(lender, k, v), k, v), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-5)


def test_a_layer_that_borrows_attends_to_the_keys_and_values_of_the_lender(lent):
    _, k, v = lent
    borrower = Attention(CONFIG, CONFIG.kinds[1], jax.random.key(1))
    found = called(borrower, lambda borrower, x: borrower(x, sides().lending("a", (k, v))), X)
    assert borrower.wk is None and borrower.wv is None and borrower.k_norm is None
    np.testing.assert_allclose(found, expected(borrower, k, v), atol=1e-5)
