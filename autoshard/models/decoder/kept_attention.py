"""Attention of new positions over kept ones and over themselves, without joining the two.

The kept keys and values are as large as the cache, so a copy of them would double what a decode step reads. Scores are
small: those of both parts are joined, and their softmax is split again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autoshard._shown import shown

INVISIBLE = -1e30  # finite, so that a row without a visible key gives no NaN


@shown
@dataclass(frozen=True)
class Part:
    """Keys that new positions see, by their scores.

    Attributes:
        scores: float32 `[batch, kv_heads, group, queries, keys]`.
        values: `[batch, keys, kv_heads, value_dim]`.
        seen: which keys each query sees, booleans `[batch, 1, queries, keys]`.
    """

    scores: jax.Array
    values: jax.Array
    seen: jax.Array


def attend(parts: Sequence[Part], sinks: jax.Array | None = None) -> jax.Array:
    """Return the result of attention over the keys of all parts, `[batch, queries, kv_heads, group, value_dim]`.

    A query that sees no key gets zeros.

    Args:
        parts: the keys.
        sinks: for each head the score of a key without a value, `[kv_heads, group]`.
    """
    seen = jnp.concatenate([part.seen for part in parts], axis=-1)[:, :, None]
    scores = jnp.where(seen, jnp.concatenate([part.scores for part in parts], axis=-1), INVISIBLE)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32)[None, :, :, None, None]
    if sink is not None:
        largest = jnp.maximum(largest, sink)
    weights = jnp.where(seen, jnp.exp(scores - largest), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - largest)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    found, first = [], 0
    for part in parts:
        own = weights[..., first : first + part.values.shape[1]].astype(part.values.dtype)
        found.append(jnp.einsum("bkgst,btkd->bskgd", own, part.values, preferred_element_type=jnp.float32))
        first += part.values.shape[1]
    return sum(found[1:], found[0]).astype(parts[0].values.dtype)
