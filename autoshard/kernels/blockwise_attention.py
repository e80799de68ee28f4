"""Attention in plain JAX, block of keys by block of keys, with a running maximum and sum.

The backward pass recomputes the scores of each block from the saved log-sum-exp. Both passes hold `queries *
block_size` elements per head (Rabe and Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135).

Queries are `[batch, queries, kv_heads, group, head_dim]`, keys and values `[batch, keys, kv_heads, head_dim]`. Scores
and softmax are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autoshard._shown import shown
from autoshard.kernels.constants import CONTEXT
from autoshard.kernels.visibility import Visibility

# The score of an invisible pair. It is finite, so that a row without a visible key does not compute inf - inf.
INVISIBLE = -1e30

# Accumulates in float32 for operands of any dtype.
einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


@shown
class Pairs(NamedTuple):
    """Arrays that restrict which pairs of a query and a key are visible; each may be None.

    Attributes:
        positions: positions of the queries, `[queries]`; by default they are counted from 0.
        mask: booleans, True where a query sees a key, `[batch, kv_heads, group, queries, keys]`; each dimension may
            be 1.
        query_segments: `[batch, queries]`; a query sees the keys of its own segment.
        key_segments: `[batch, keys]`.
    """

    positions: jax.Array | None = None
    mask: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Return `cap * tanh(x / cap)`, which lies between `-cap` and `cap`. If `cap` is None, return `x`.

    >>> [round(float(each), 2) for each in soft_capped(jnp.array([0.0, 1.0, 100.0]), 2.0)]
    [0.0, 0.92, 2.0]
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(y: jax.Array, cap: float) -> jax.Array:
    """Return the derivative of `soft_capped` where its result is `y`: `1 - (y / cap)^2`."""
    return 1.0 - jnp.square(y / cap)


@shown
@dataclass(frozen=True)
class Softmax:
    """The static part of an attention call.

    Attributes:
        visibility: which keys a query sees by position.
        scale: factor of the scores.
        soft_cap: scores are `soft_cap * tanh(score / soft_cap)`; None for no cap.
    """

    visibility: Visibility
    scale: float
    soft_cap: float | None = None

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return scores `[batch, kv_heads, group, queries, keys]`."""
        scores = einsum("bskgd,btkd->bkgst", q, k) * self.scale
        return soft_capped(scores, self.soft_cap)

    def slope(self, scores: jax.Array) -> jax.Array | float:
        """Return the derivative of the scores with respect to `q . k`."""
        return self.scale if self.soft_cap is None else self.scale * soft_cap_slope(scores, self.soft_cap)

    def visible(self, pairs: Pairs, queries: int, keys: int, start: Any = 0) -> jax.Array | None:
        """Return which pairs are visible, broadcastable to the scores' shape; None for all.

        The keys are `keys` consecutive ones from position `start` on. `pairs` has the mask and the segments of these
        alone.
        """
        found = pairs.mask
        if not self.visibility.is_full:
            shape = (1, 1, 1, queries, keys)
            key = lax.broadcasted_iota(jnp.int32, shape, 4) + start
            query = lax.broadcasted_iota(jnp.int32, shape, 3) if pairs.positions is None else pairs.positions[:, None]
            found = _and(found, self.visibility(query, key))
        if pairs.query_segments is not None and pairs.key_segments is not None:
            same = pairs.query_segments[:, :, None] == pairs.key_segments[:, None, :]
            found = _and(found, same[:, None, None])
        return found


def _and(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def blockwise_attention(
    softmax: Softmax,
    block_size: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    sinks: jax.Array | None,
) -> jax.Array:
    """Return attention's result, shaped like `q`. A row without a visible key is 0.

    Args:
        softmax: the static part.
        block_size: number of keys in a block; need not divide the number of keys.
        q: queries.
        k: keys.
        v: values.
        pairs: which pairs are visible.
        sinks: for each head the score of a key without a value, `[kv_heads, group]`, or None.
    """
    return blockwise_forward(softmax, block_size, q, k, v, pairs, sinks)[0]


def _forward(softmax: Softmax, block_size: int, q, k, v, pairs, sinks):
    # Named here, because the backward pass reads these two. If only the caller's copy had the name, a policy that saves
    # it would still run the scan again.
    out, log_total = (
        checkpoint_name(x, CONTEXT) for x in blockwise_forward(softmax, block_size, q, k, v, pairs, sinks)
    )
    return out, (q, k, v, pairs, sinks, out, log_total)


def _backward(softmax: Softmax, block_size: int, saved, d_out):
    q, k, v, pairs, sinks, out, log_total = saved
    gradients = blockwise_backward(softmax, block_size, q, k, v, pairs, out, log_total, d_out)
    return *gradients, None, None if sinks is None else sink_gradient(sinks, out, log_total, d_out)


blockwise_attention.defvjp(_forward, _backward)


def sink_gradient(sinks: jax.Array, out: jax.Array, log_total: jax.Array, d_out: jax.Array) -> jax.Array:
    """Return the gradient of the sinks, `[kv_heads, group]`, from attention's result and its cotangent."""
    weights = jnp.exp(sinks[..., None].astype(jnp.float32) - log_total)
    return -einsum("bkgs,bskgd,bskgd->kg", weights, d_out, out).astype(sinks.dtype)


def blockwise_forward(
    softmax: Softmax, block_size: int, q: jax.Array, k: jax.Array, v: jax.Array, pairs: Pairs, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the log-sum-exp of each row of scores, `[batch, kv_heads, group, queries]`."""
    batch, queries, kv_heads, group, head_dim = q.shape
    blocks = _blocks(block_size, k, v, pairs)

    def step(carry, inputs):
        acc, running_max, total = carry
        block = _Block(*inputs)
        scores = softmax.scores(q, block.k)
        visible = _visible(softmax, pairs, block, queries, k.shape[1])
        if visible is not None:
            scores = jnp.where(visible, scores, INVISIBLE)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_max[..., None])
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp(running_max - new_max)
        part = einsum("bkgst,btkd->bkgsd", weights.astype(v.dtype), block.v)
        return (acc * shrink[..., None] + part, new_max, total * shrink + jnp.sum(weights, axis=-1)), None

    rows = (batch, kv_heads, group, queries)
    if sinks is None:
        first, total = jnp.full(rows, INVISIBLE, jnp.float32), jnp.zeros(rows, jnp.float32)
    else:
        first = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None], rows)
        total = jnp.ones(rows, jnp.float32)
    zero = (jnp.zeros((*rows, v.shape[-1]), jnp.float32), first, total)
    (acc, running_max, total), _ = lax.scan(step, zero, blocks)
    total = jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("bkgsd->bskgd", acc / total[..., None]).astype(q.dtype)
    return out, running_max + jnp.log(total)


def blockwise_backward(
    softmax: Softmax,
    block_size: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pairs: Pairs,
    out: jax.Array,
    log_total: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of `q`, `k` and `v`."""
    blocks = _blocks(block_size, k, v, pairs)
    # Softmax's gradient subtracts sum_j weight * d_weight of each row, which equals the row's d_out . out.
    inner = einsum("bskgd,bskgd->bkgs", d_out, out)

    def step(d_q, inputs):
        block = _Block(*inputs)
        scores = softmax.scores(q, block.k)
        weights = jnp.exp(scores - log_total[..., None])
        visible = _visible(softmax, pairs, block, q.shape[1], k.shape[1])
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        d_v = einsum("bkgst,bskgd->btkd", weights.astype(d_out.dtype), d_out)
        d_weights = einsum("bskgd,btkd->bkgst", d_out, block.v)
        d_scores = (weights * (d_weights - inner[..., None]) * softmax.slope(scores)).astype(q.dtype)
        d_k = einsum("bkgst,bskgd->btkd", d_scores, q)
        d_q = d_q + einsum("bkgst,btkd->bskgd", d_scores, block.k)
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, (d_k, d_v) = lax.scan(step, jnp.zeros(q.shape, jnp.float32), blocks)
    return d_q.astype(q.dtype), _merge_blocks(d_k, k.shape[1]), _merge_blocks(d_v, v.shape[1])


@shown
class _Block(NamedTuple):
    """One block of keys: the position of its first key, its keys and values, and its part of mask and segments."""

    start: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array | None
    segments: jax.Array | None


def _blocks(block_size: int, k: jax.Array, v: jax.Array, pairs: Pairs) -> _Block:
    """Return the scan's inputs, with the blocks of keys in a leading dimension."""
    count = -(-k.shape[1] // block_size)
    mask, segments = pairs.mask, pairs.key_segments
    return _Block(
        jnp.arange(count, dtype=jnp.int32) * block_size,
        _split(k, 1, count, block_size),
        _split(v, 1, count, block_size),
        None if mask is None or mask.shape[4] == 1 else _split(mask, 4, count, block_size),
        None if segments is None else _split(segments, 1, count, block_size),
    )


def _visible(softmax: Softmax, pairs: Pairs, block: _Block, queries: int, keys: int) -> jax.Array | None:
    """Return which pairs of a query and a key of the block are visible; None for all."""
    size = block.k.shape[1]
    mask = pairs.mask if block.mask is None else block.mask
    of_block = pairs._replace(mask=mask, key_segments=block.segments)
    found = softmax.visible(of_block, queries, size, block.start)
    if keys % size:
        found = _and(found, lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, size), 4) + block.start < keys)
    return found


def _split(x: jax.Array, axis: int, count: int, block: int) -> jax.Array:
    """Reshape dimension `axis` to `[count, block]`, padded with zeros, and move `count` to the front."""
    missing = count * block - x.shape[axis]
    if missing:
        x = jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _merge_blocks(blocks: jax.Array, keys: int) -> jax.Array:
    """Undo `_split` on dimension 1: reshape `[count, batch, block, ...]` to `[batch, keys, ...]`."""
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :keys]
