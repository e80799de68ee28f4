"""Attention over parts equals attention over the keys of all parts together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.kernels.blockwise_attention import Pairs, Softmax, Visibility
from autoshard.kernels.plain_attention import plain_attention
from autoshard.models.decoder.kept_attention import Part, attend

BATCH, QUERIES, KV_HEADS, GROUP, DIM = 2, 3, 2, 2, 4
SOFTMAX = Softmax(Visibility(causal=False), 0.5, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_equal_one_array_of_keys(with_sinks):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    q = jax.random.normal(next(keys), (BATCH, QUERIES, KV_HEADS, GROUP, DIM))
    sizes = 5, 3, 1
    ks = [jax.random.normal(next(keys), (BATCH, size, KV_HEADS, DIM)) for size in sizes]
    vs = [2 * k + 1 for k in ks]
    seen = jax.random.bernoulli(next(keys), 0.5, (BATCH, 1, QUERIES, sum(sizes))).at[1, 0, 2].set(False)
    sinks = jax.random.normal(next(keys), (KV_HEADS, GROUP)) if with_sinks else None
    splits = np.cumsum(sizes)[:-1]
    parts = [
        Part(SOFTMAX.scores(q, k), v, own) for k, v, own in zip(ks, vs, jnp.split(seen, splits, axis=-1), strict=True)
    ]
    joined = plain_attention(
        SOFTMAX, q, jnp.concatenate(ks, axis=1), jnp.concatenate(vs, axis=1), Pairs(None, seen[:, None]), sinks
    )
    found = attend(parts, sinks)
    np.testing.assert_allclose(found, joined, atol=1e-6)
    assert not found[1, 2].any()  # this query sees no key
