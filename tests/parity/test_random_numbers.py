"""Random numbers and dropout masks of a step are the same under every plan, bit for bit.

Normal numbers are rounded by the code of `erf_inv`, which XLA compiles for the shape of a shard: they may differ by an
ulp or two. What they are computed from does not differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard
from autoshard.models.transformer import dropout_add
from tests.parity.mixed_parameters import arguments, gradients_of, shapes

PARAMS, TOKENS = arguments(shapes(seq=8, width=16, hidden=16, vocab=32, experts=8, frozen=8), batch=16)
LAYERS = {"a": jnp.full((3, 16, 32), 0.1), "b": jnp.full((3, 32, 16), 0.1)}


def draws(p, tokens, key):
    """Return parameters with noise, the noise, and what was drawn in the shapes of activations."""
    noise = {name: jax.random.normal(jax.random.fold_in(key, n), w.shape) for n, (name, w) in enumerate(p.items())}
    keys = jax.random.split(key, 5)
    x = p["embed"][tokens]
    mask = jax.random.bernoulli(keys[0], 0.9, x.shape)
    more = [jax.random.uniform(keys[1], x.shape), jax.random.permutation(keys[2], tokens.shape[0]),
            jax.random.randint(keys[3], tokens.shape, 0, 99), jax.random.bits(keys[4], (8, 16))]  # fmt: skip
    updated = {name: p[name] - 0.1 * g + 0.01 * noise[name] for name, g in gradients_of(p, tokens).items()}
    updated["embed"] += 1e-3 * jax.grad(lambda e: (e[tokens] * mask).sum())(p["embed"])
    return {**p, **updated}, noise, mask, more


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 ep:2 tp:2", "tp:4 dp:2 seq"])
def test_every_draw_has_the_same_bits(words):
    args = PARAMS, TOKENS, jax.random.key(7)
    _, noise, *drawn = jax.device_get(jax.jit(draws)(*args))
    _, found_noise, *found = jax.device_get(auto_shard(draws, plan=words)(*args))
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    for name in noise:
        np.testing.assert_allclose(found_noise[name], noise[name], rtol=1e-6)


def with_dropout(remat):
    """Return a step of layers with dropout, and their masks. No product is zero, so zeros are dropped elements."""

    def layer(x, xs):
        w, key = xs
        y = dropout_add(jnp.zeros_like(x), jnp.tanh(x @ w["a"]) @ w["b"] + 1, 0.25, key)
        return y + 1, y != 0

    def loss(p, x, key):
        y, masks = jax.lax.scan(remat(layer), x, (p, jax.random.split(key, 3)))
        return (y**2).mean(), masks

    def step(p, x, key):
        gradients, masks = jax.grad(loss, has_aux=True)(p, x, key)
        return jax.tree.map(jnp.subtract, p, gradients), masks

    return step


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "remat", "microbatches"),
    [("fsdp:8", jax.checkpoint, 1), ("dp:2 tp:4", jax.checkpoint, 2), ("dp:2 fsdp:2 tp:2", lambda f: f, 1)],
)
def test_dropout_masks_depend_on_the_key_alone(words, remat, microbatches):
    args = LAYERS, jnp.ones((16, 16)), jax.random.key(3)
    new, masks = jax.device_get(jax.jit(with_dropout(lambda f: f))(*args))
    found, found_masks = jax.device_get(auto_shard(with_dropout(remat), plan=words, microbatches=microbatches)(*args))
    np.testing.assert_array_equal(found_masks, masks)
    assert 0.6 < masks.mean() < 0.9
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, new)
