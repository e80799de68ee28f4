"""Values of the whole batch that repeat for each row: a microbatch computes its part of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.microbatches.accumulation import in_microbatches
from autoshard.sharding.microbatches.flow import find_flow
from autoshard.sharding.microbatches.states import Cut, Split
from autoshard.sharding.rewrite.evaluation import rewritten

ROWS, SEQ, WIDTH = 8, 4, 16


def masked(x, weights, mask):
    """Layers over which a mask is repeated; the mask is computed outside of the loop over the layers."""

    def layer(y, w):
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", y, y), -1e9)
        return y + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), y) @ w, None

    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0]


def causal_step(weights, x):
    def loss(weights):
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((SEQ, SEQ), bool)), (ROWS, SEQ, SEQ)) & True
        return (masked(x, weights, causal) ** 2).mean()

    return jax.value_and_grad(loss)(weights)


def positions_step(weights, x):
    """The mask differs between the rows, so a microbatch takes its slice."""

    def loss(weights):
        mask = jnp.arange(SEQ) <= jnp.arange(ROWS)[:, None, None] % SEQ + jnp.zeros((1, SEQ, 1), int)
        return (masked(x, weights, mask) ** 2).mean()

    return jax.value_and_grad(loss)(weights)


@pytest.mark.few(1)
@pytest.mark.parametrize(("step", "has_whole"), [(causal_step, False), (positions_step, True)])
def test_a_mask_that_repeats_is_not_sliced(step, has_whole):
    weights = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) * 0.1
    args = weights, jax.random.normal(jax.random.key(1), (ROWS, SEQ, WIDTH))
    closed = rewritten(jax.make_jaxpr(step)(*args))
    cut = jax.make_jaxpr(in_microbatches(closed, find_flow(closed, {1: Split(0)}, 4), Cut(4)))(*args)
    assert (f"bool[{ROWS},{SEQ},{SEQ}]" in str(_compat.dce(cut))) == has_whole
    found = _compat.jaxpr_as_function(cut)(*args)
    for one, other in zip(found, jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
