"""Rows without a visible key have the values and gradients of equal weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.two_passes import Kernel, Passes, forward_pass, gradients_pass
from autoshard.kernels.unseen_rows import Unseen
from autoshard.kernels.visibility import Visibility

SCALE = 0.3


def plain(unseen: Unseen, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    scores, mask = jnp.einsum("bskgd,btkd->bkgst", q, k) * SCALE, mask[:, None, None]
    low = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask, scores, low) if unseen == "blocked" else scores + jnp.where(mask, 0.0, low)
    return jnp.einsum("bkgst,btke->bskge", jax.nn.softmax(scores), v)


@pytest.mark.slow
@pytest.mark.parametrize("unseen", ["blocked", "passing"])
@pytest.mark.parametrize("kernel", ["blockwise", "splash"])
def test_values_and_gradients_are_those_of_equal_weights(kernel: Kernel, unseen: Unseen) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 128, 2, 3, 8), (2, 128, 2, 8), (2, 128, 2, 4), (2, 128, 2, 3, 4)]
    q, k, v, d_out = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    segments: Any = [jnp.broadcast_to(jnp.arange(128) // 32 * n % 3, (2, 128)) for n in (1, 2)]
    segments[0] = segments[0].at[1, 40:].set(9)
    passes = Passes(kernel, Softmax(Visibility(causal=True), SCALE), unseen)
    mask = (segments[0][:, :, None] == segments[1][:, None]) & jnp.tril(jnp.ones((128, 128), bool))
    assert 0 < int(jnp.any(mask, -1).sum()) < 256
    out, log_sum = forward_pass(passes, q, k, v, *segments)
    expected, pullback = jax.vjp(lambda q, k, v: plain(unseen, q, k, v, mask), q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    found = gradients_pass(passes, q, k, v, out, log_sum, d_out, *segments)
    for x, y in zip(found, pullback(d_out), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=3e-5)
