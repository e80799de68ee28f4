"""Attention in plain JAX that holds the whole score matrix, `queries * keys` elements per head.

Shapes are those of `blockwise_attention`. Scores and softmax are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.kernels.blockwise_attention import INVISIBLE, Pairs, Softmax


def plain_attention(
    softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, sinks: jax.Array | None
) -> jax.Array:
    """Return attention's result, shaped like `q`. A row without a visible key is 0."""
    scores = softmax.scores(q, k)
    visible = softmax.visible(pairs, q.shape[1], k.shape[1])
    if visible is not None:
        scores = jnp.where(visible, scores, INVISIBLE)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32)[None, :, :, None, None]
    if sink is not None:
        largest = jnp.maximum(largest, sink)
    largest = lax.stop_gradient(largest)
    weights = jnp.exp(scores - largest)
    if pairs.mask is None and pairs.query_segments is None and sink is None:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    else:  # a mask can leave a row without a visible key; its weights are then all exp(0)
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sink is not None:
            total = total + jnp.exp(sink - largest)
        weights = weights / jnp.where(total == 0.0, 1.0, total)
    return jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v).astype(q.dtype)
