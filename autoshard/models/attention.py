"""Scaled dot-product attention in three implementations: plain, blockwise, and cuDNN's kernel.

For queries q, keys k, values v and a set M of visible (query, key) pairs:

    scores[i, j] = scale * q[i] . k[j]                for (i, j) in M
    out[i]       = sum_j softmax_j(scores[i, :]) v[j]

The plain implementation holds the whole score matrix, `seq * seq` elements per head. The blockwise implementation scans
over blocks of keys with a running maximum and sum. Its backward pass recomputes each block from the saved log-sum-exp,
so both passes hold `seq * block_size` elements per head (Rabe and Staats 2021, arXiv:2112.05682; Dao et al. 2022,
arXiv:2205.14135).

With grouped queries, keys and values are not repeated: query heads are reshaped to `[kv_heads, group]` and contracted
with the `kv_heads` key and value heads. The queries' sequence is not split into blocks, so it can be sharded while keys
and values are gathered. Both implementations compute scores and softmax in float32, and return 0 for a row without a
visible key.

cuDNN's fused kernel runs on NVIDIA GPUs, through `jax.nn.dot_product_attention`, sharded over batch and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.models.remat.named_values import named

Impl = Literal["auto", "plain", "blockwise", "cudnn"]

# With at least this many keys, `auto` uses the blockwise implementation. Below, the score matrix is small: 2048 x 2048
# float32 scores are 16 MiB per head. Chosen, not measured.
AUTO_BLOCKWISE_KEYS = 2048

# The score of an invisible pair. It is finite, so that a row without a visible key does not compute inf - inf.
_INVISIBLE = -1e30

# Accumulates in float32 for operands of any dtype.
_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    impl: Impl = "auto",
    block_size: int = 512,
    mask: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Scaled dot-product attention with grouped queries.

    Args:
        q: queries, `[batch, seq, heads, head_dim]`.
        k: keys, `[batch, keys, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        v: values, shaped like `k`.
        causal: position i sees positions up to i; needs `keys == seq`.
        impl: `plain`; `blockwise`; `auto`, which is blockwise for at least `AUTO_BLOCKWISE_KEYS` keys; or `cudnn`, for
            16-bit arrays on NVIDIA GPUs. With `cudnn`, a row without a visible key is undefined.
        block_size: number of keys in a block of the blockwise implementation; need not divide `keys`.
        mask: booleans, True where a query sees a key, `[batch, heads, seq, keys]`; each dimension may be 1.
        scale: factor of the scores; defaults to `1 / sqrt(head_dim)`.

    Returns:
        `[batch, seq, heads, head_dim]` in q's dtype. A row without a visible key is 0.

    Raises:
        ValueError: if the shapes do not match, `impl` is unknown, or `cudnn` cannot run here.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attention(x, x, x, causal=True).shape
    (1, 4, 2, 8)
    """
    _check(q, k, v, causal, impl, block_size, mask)
    batch, seq, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    if impl == "cudnn":
        return named(_cudnn(q, k, v, mask, causal=causal, scale=scale), "context")
    group = heads // kv_heads
    grouped = q.reshape(batch, seq, kv_heads, group, head_dim)
    if mask is not None:
        mask = _group_mask(mask, kv_heads, group)
    if impl == "auto":
        impl = "blockwise" if keys >= AUTO_BLOCKWISE_KEYS else "plain"
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if impl == "plain":
        out = named(_plain(grouped, k, v, mask, causal=causal, scale=scale), "context")
    else:
        out = _blockwise(causal, scale, min(block_size, keys), grouped, k, v, mask)
    return out.reshape(batch, seq, heads, head_dim)  # pyright: ignore[reportAttributeAccessIssue]


def _check(q, k, v, causal: bool, impl: str, block_size: int, mask) -> None:
    problems = []
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        problems.append(
            "q must be [batch, seq, heads, head_dim], and both k and v must be [batch, keys, kv_heads, head_dim]"
        )
    else:
        if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
            problems.append("q and k must agree in batch (dim 0) and head_dim (dim 3)")
        if q.shape[2] % k.shape[2]:
            problems.append(
                f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} kv heads (dim 2); change one of them"
            )
        if causal and q.shape[1] != k.shape[1]:
            problems.append("causal=True needs as many keys as queries (dim 1); pass mask= for anything else")
        if mask is not None:
            full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            if mask.dtype != jnp.bool_:
                problems.append(f"mask must be boolean, True where a query sees a key, not {mask.dtype}")
            if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=False)):
                problems.append(
                    f"mask {mask.shape} must be [batch, heads, seq, keys] = {full}, where each dimension may be 1"
                )
    if impl not in get_args(Impl):
        problems.append(f"impl is {impl!r}; choose one of {', '.join(get_args(Impl))}")
    if impl == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
        problems.append(f"impl is 'cudnn', which takes bfloat16 and float16, not {q.dtype}; cast q, or choose 'auto'")
    if block_size < 1:
        problems.append(f"block_size is {block_size}; it must be at least 1")
    if problems:
        shapes = f"attention(q {q.shape}, k {k.shape}, v {v.shape})"
        raise ValueError(f"{shapes}: " + "; ".join(problems))


def _group_mask(mask: jax.Array, kv_heads: int, group: int) -> jax.Array:
    """Reshape `[batch, heads, seq, keys]` to `[batch, kv_heads, group, seq, keys]`; dimensions of 1 stay 1."""
    batch, heads, seq, keys = mask.shape
    split = (1, 1) if heads == 1 else (kv_heads, group)
    return mask.reshape(batch, *split, seq, keys)


def _scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """Compute scores `[batch, kv_heads, group, seq, keys]` in float32."""
    return _einsum("bskgd,btkd->bkgst", q, k) * scale


def _causal(seq: int, keys: int, start: jax.Array | None = None) -> jax.Array:
    """Make the causal mask `[1, 1, 1, seq, keys]`; the first key is at position `start`, 0 by default."""
    shape = (1, 1, 1, seq, keys)
    query, key = lax.broadcasted_iota(jnp.int32, shape, 3), lax.broadcasted_iota(jnp.int32, shape, 4)
    return query >= (key if start is None else key + start)


def _and_masks(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _cudnn(q, k, v, mask, *, causal: bool, scale: float | None) -> jax.Array:
    try:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, scale=scale, implementation="cudnn")
    except RuntimeError as error:  # raised by JAX if cuDNN is missing or too old
        raise ValueError(
            f"attention: impl 'cudnn' cannot run here ({error}): it needs an NVIDIA GPU and cuDNN, but the backend is "
            f"{jax.default_backend()}; choose 'auto'"
        ) from error


def _plain(q, k, v, mask, *, causal: bool, scale: float) -> jax.Array:
    scores = _scores(q, k, scale)
    visible = _and_masks(mask, _causal(q.shape[1], k.shape[1]) if causal else None)
    if visible is not None:
        scores = jnp.where(visible, scores, _INVISIBLE)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    if mask is None or visible is None:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    else:  # a mask can leave a row without a visible key; its weights are then all exp(0)
        weights = jnp.where(visible, weights, 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0.0, 1.0, total)
    return jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v).astype(q.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _blockwise(causal: bool, scale: float, block: int, q, k, v, mask) -> jax.Array:
    return _blockwise_forward(causal, scale, block, q, k, v, mask)[0]


def _blockwise_forward(causal: bool, scale: float, block: int, q, k, v, mask):
    batch, seq, kv_heads, group, head_dim = q.shape
    blocks, visible = _blocks(causal, block, seq, k, v, mask)

    def step(carry, inputs):
        acc, running_max, total = carry
        start, k_block, v_block, mask_block = inputs
        scores = _scores(q, k_block, scale)
        visible_pairs = visible(start, mask_block)
        if visible_pairs is not None:
            scores = jnp.where(visible_pairs, scores, _INVISIBLE)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_max[..., None])
        if visible_pairs is not None:
            weights = jnp.where(visible_pairs, weights, 0.0)
        shrink = jnp.exp(running_max - new_max)
        part = _einsum("bkgst,btkd->bkgsd", weights.astype(v.dtype), v_block)
        return (acc * shrink[..., None] + part, new_max, total * shrink + jnp.sum(weights, axis=-1)), None

    rows = (batch, kv_heads, group, seq)
    zero = (
        jnp.zeros((*rows, head_dim), jnp.float32),
        jnp.full(rows, _INVISIBLE, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    (acc, running_max, total), _ = lax.scan(step, zero, blocks)
    total = jnp.where(total == 0.0, 1.0, total)
    # Named here, because the backward pass reads these two. A name on the caller's copy would not spare the scan.
    out = named(jnp.einsum("bkgsd->bskgd", acc / total[..., None]).astype(q.dtype), "context")
    return out, (q, k, v, mask, out, named(running_max + jnp.log(total), "context"))


def _blockwise_backward(causal: bool, scale: float, block: int, saved, d_out):
    q, k, v, mask, out, log_total = saved
    blocks, visible = _blocks(causal, block, q.shape[1], k, v, mask)
    # Softmax's gradient subtracts sum_j weight * d_weight of each row, which equals the row's d_out . out.
    inner = _einsum("bskgd,bskgd->bkgs", d_out, out)

    def step(d_q, inputs):
        start, k_block, v_block, mask_block = inputs
        weights = jnp.exp(_scores(q, k_block, scale) - log_total[..., None])
        visible_pairs = visible(start, mask_block)
        if visible_pairs is not None:
            weights = jnp.where(visible_pairs, weights, 0.0)
        d_v = _einsum("bkgst,bskgd->btkd", weights.astype(d_out.dtype), d_out)
        d_weights = _einsum("bskgd,btkd->bkgst", d_out, v_block)
        d_scores = (weights * (d_weights - inner[..., None]) * scale).astype(q.dtype)
        d_k = _einsum("bkgst,bskgd->btkd", d_scores, q)
        d_q = d_q + _einsum("bkgst,btkd->bskgd", d_scores, k_block)
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, (d_k, d_v) = lax.scan(step, jnp.zeros(q.shape, jnp.float32), blocks)
    return d_q.astype(q.dtype), _merge_blocks(d_k, k.shape[1]), _merge_blocks(d_v, v.shape[1]), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)

# (position of a block's first key, the block's mask) -> which of the block's keys each query sees, None for all.
Visible = Callable[[jax.Array, jax.Array | None], jax.Array | None]


def _blocks(causal: bool, block: int, seq: int, k, v, mask) -> tuple[tuple, Visible]:
    """Return the scan's inputs, one entry per block of keys, and a function that returns the mask of a block."""
    keys = k.shape[1]
    count = -(-keys // block)
    mask_blocks = None if mask is None or mask.shape[4] == 1 else _split(mask, 4, count, block)
    starts = jnp.arange(count, dtype=jnp.int32) * block
    blocks = (starts, _split(k, 1, count, block), _split(v, 1, count, block), mask_blocks)

    def visible(start, mask_block):
        visible_pairs = mask if mask_blocks is None else mask_block
        if causal:
            visible_pairs = _and_masks(visible_pairs, _causal(seq, block, start))
        if count * block != keys:
            position = lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, block), 4) + start
            visible_pairs = _and_masks(visible_pairs, position < keys)
        return visible_pairs

    return blocks, visible


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
