"""The cross-entropy loss as a sum and a count, so that the sums of microbatches and shards add up exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def cross_entropy(logits: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Sum `log sum_v exp(logits[v]) - logits[target]` over tokens, and count the tokens.

    The target's logit is selected by a comparison and a sum, not by indexing, so that logits with a sharded vocabulary
    are not gathered.

    Args:
        logits: `[..., vocab]`.
        targets: integers `[...]`, arbitrary where the mask is 0.
        mask: weights or booleans `[...]`; defaults to 1 everywhere.

    Returns:
        The loss in nats and the count, float32 scalars. For a mean, add up both over batches, then divide.

    >>> total, count = cross_entropy(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), jnp.int32))
    >>> round(float(total / count), 4)  # log 4
    1.3863
    """
    return sum_and_count(token_losses(logits, targets), mask)


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the cross-entropy of each token in nats, float32 `[...]`; see `cross_entropy`."""
    logits = logits.astype(jnp.float32)
    logits = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    classes = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(classes == targets[..., None], logits, 0.0), axis=-1)
    return jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - picked


def sum_and_count(losses: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Sum the tokens' losses, weighted by the mask, and the weights; without a mask all weights are 1."""
    if mask is None:
        return jnp.sum(losses), jnp.float32(losses.size)
    weights = mask.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)
