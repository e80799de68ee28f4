"""Attention and the operators around it: positions, masks, caches, gated feed-forward layers.

For the queries q, keys k and values v of one head, and a bias or mask that is added to the scores:

    scores[i, j] = q[i] . k[j] / sqrt(head_dim) + bias[i, j]
    out[i]       = sum_j softmax_j(scores[i, :]) v[j]

Sharding the batch or the heads moves no data. The scores have the sequence dimension twice: where it is sharded,
the queries stay sharded, and the keys and values are gathered. Arrays are `[batch, seq, heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32

_MASKED = -1e30  # a masked score. Finite, so that a block of masked keys does not compute inf - inf


def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Attention to all keys, in float32, with an additive bias `[batch, heads, seq, keys]` (any of these may be 1)."""
    return jax.nn.dot_product_attention(q, k, v, bias)


def attention_with_mask(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention to the keys where a boolean mask `[batch, heads, seq, keys]` (any of these may be 1) is true."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention to the keys up to the query's position. If k and v have fewer heads, groups of q's heads share them."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def sliding_window_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int = 4) -> jax.Array:
    """Attention to the query's position and the `window` positions before it (arXiv:2004.05150)."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(window, 0))


def padded_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention to the first `lengths[b]` keys of example b."""
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def soft_capped_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, cap: float = 30.0) -> jax.Array:
    """Attention whose scores a tanh limits to between -cap and cap (Gemma 2, arXiv:2408.00118)."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(cap * jnp.tanh(scores / cap), -1)
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)


def attention_with_sinks(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    """Attention with one extra score per head `[heads]` that has no value (arXiv:2309.17453, gpt-oss)."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    sink = sinks.astype(jnp.float32).reshape(1, -1, 1, 1)
    top = lax.stop_gradient(jnp.maximum(jnp.max(scores, -1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    weights = weights / (jnp.sum(weights, -1, keepdims=True) + jnp.exp(sink - top))
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)


def blockwise_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int = 4) -> jax.Array:
    """Causal attention that computes the scores of `block` keys at a time (arXiv:2112.05682).

    Scans over the blocks with a running maximum m, sum s and weighted sum o for each query:

        m' = max(m, max(scores)),    s' = s exp(m - m') + sum(exp(scores - m')),    o' likewise

    The result is `o / s`. The backward pass recomputes the scores of each block.

    Args:
        q: `[batch, seq, heads, head_dim]`.
        k: `[batch, seq, heads, head_dim]`.
        v: shaped like k.
        block: how many keys are processed at a time; divides seq.
    """
    batch, seq, heads, head_dim = q.shape
    position = lax.broadcasted_iota(jnp.int32, (1, 1, seq, 1), 2)

    @jax.checkpoint
    def step(carry: tuple[jax.Array, ...], part: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        top, total, out = carry
        start, keys, values = part
        scores = jnp.einsum("bshd,bthd->bhst", q, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
        visible = position >= start + lax.broadcasted_iota(jnp.int32, (1, 1, 1, block), 3)
        new_top = lax.stop_gradient(jnp.maximum(top, jnp.max(jnp.where(visible, scores, _MASKED), -1)))
        weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        part_out = jnp.einsum("bhst,bthd->bhsd", weights, values, preferred_element_type=jnp.float32)
        return (new_top, total * decay + jnp.sum(weights, -1), out * decay[..., None] + part_out), None

    rows = (batch, heads, seq)
    first = (jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    starts = jnp.arange(0, seq, block, dtype=jnp.int32)
    (_, total, out), _ = lax.scan(step, first, (starts, _blocks(k, block), _blocks(v, block)))
    return jnp.moveaxis(out / total[..., None], 1, 2).astype(q.dtype)


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """`[batch, seq, ...]` to `[seq / block, batch, block, ...]`."""
    batch, seq, *rest = x.shape
    return jnp.moveaxis(x.reshape(batch, seq // block, block, *rest), 1, 0)


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`phi(q) (phi(k)' v) / phi(q) sum(phi(k))` with `phi = elu + 1`, linear in the sequence (arXiv:2006.16236)."""
    q, k = jax.nn.elu(q) + 1.0, jax.nn.elu(k) + 1.0
    state = jnp.einsum("bthd,bthe->bhde", k, v)
    total = jnp.einsum("bshd,bhd->bsh", q, jnp.sum(k, 1))
    return jnp.einsum("bshd,bhde->bshe", q, state) / total[..., None]


def multi_head_attention(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array) -> jax.Array:
    """Causal self-attention with its projections: x `[batch, seq, embed]`.

    wq, wk and wv are `[embed, heads, head_dim]` and wo is `[heads, head_dim, embed]`. If the heads of all four are
    sharded, the result is a partial sum: one reduction per layer (arXiv:1909.08053).
    """
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w) for w in (wq, wk, wv))
    return jnp.einsum("bshd,hde->bse", causal_attention(q, k, v), wo)


def cross_attention(
    x: jax.Array, context: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array
) -> jax.Array:
    """Attention from x `[batch, seq, embed]` to a context `[batch, keys, width]`, with its projections.

    wq is `[embed, heads, head_dim]`, wk and wv are `[width, heads, head_dim]`, wo is `[heads, head_dim, embed]`.
    """
    q = jnp.einsum("bse,ehd->bshd", x, wq)
    k, v = (jnp.einsum("btc,chd->bthd", context, w) for w in (wk, wv))
    return jnp.einsum("bshd,hde->bse", attention(q, k, v), wo)


def latent_attention(x: jax.Array, wq: jax.Array, down: jax.Array, up_k: jax.Array, up_v: jax.Array) -> jax.Array:
    """Causal attention with keys and values computed from a narrow latent (DeepSeek-V2, arXiv:2405.04434).

    x is `[batch, seq, embed]`, wq is `[embed, heads, head_dim]`, down is `[embed, latent]`, up_k and up_v are
    `[latent, heads, head_dim]`. A cache would hold the latent `[batch, seq, latent]`.
    """
    latent = jnp.einsum("bse,el->bsl", x, down)
    k, v = (jnp.einsum("bsl,lhd->bshd", latent, up) for up in (up_k, up_v))
    return causal_attention(jnp.einsum("bse,ehd->bshd", x, wq), k, v)


def kv_cache_update(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes k and v `[batch, seq, heads, head_dim]` into caches `[batch, length, heads, head_dim]` at `start`."""
    return tuple(
        lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), start, 1)
        for cache, new in ((k_cache, k), (v_cache, v))
    )  # pyright: ignore[reportReturnType]


def ragged_cache_update(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes a row `new[b]` at `positions[b]` of each example of a cache `[batch, length, heads, head_dim]`.

    Uses `vmap`, so that the batch is a batching dimension of the scatter and not an indexed dimension.
    """
    return jax.vmap(lambda rows, row, at: rows.at[at].set(row.astype(rows.dtype)))(cache, new, positions)


def decode_attention(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, lengths: jax.Array) -> jax.Array:
    """Attention from one query per example `[batch, heads, head_dim]` to the first `lengths[b]` rows of its cache."""
    return jnp.squeeze(padded_attention(jnp.expand_dims(q, 1), k_cache, v_cache, lengths), 1)


def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Attention from one query per example to keys and values in pages of a shared pool (arXiv:2309.06180).

    Args:
        q: `[batch, heads, head_dim]`.
        k_pages: `[pages, page_size, heads, head_dim]`.
        v_pages: shaped like k_pages.
        table: the page numbers of each example in order, integers `[batch, max_pages]`.
        lengths: how many rows of its pages each example uses, `[batch]`.
    """
    batch, max_pages = table.shape
    rows = (batch, max_pages * k_pages.shape[1], *k_pages.shape[2:])
    return decode_attention(q, k_pages[table].reshape(rows), v_pages[table].reshape(rows), lengths)


def _angles(positions: jax.Array, half: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of `positions * base^(-i / half)`, `[batch, seq, 1, half]`."""
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency.reshape(1, 1, 1, -1)
    return jnp.cos(angle), jnp.sin(angle)


def rope(x: jax.Array, positions: jax.Array, *, base: float = 10000.0) -> jax.Array:
    """Rotates the pairs `(x[i], x[i + head_dim / 2])` by position, as GPT-NeoX and Llama do (arXiv:2104.09864).

    Args:
        x: `[batch, seq, heads, head_dim]`.
        positions: integers `[batch, seq]`.
        base: the slowest pair rotates by about `1 / base` radians per position.
    """
    cos, sin = _angles(positions, x.shape[-1] // 2, base)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def rope_interleaved(x: jax.Array, positions: jax.Array, *, base: float = 10000.0) -> jax.Array:
    """Rotates the pairs `(x[2 i], x[2 i + 1])`, as GPT-J and the paper do. The arguments are those of `rope`."""
    cos, sin = _angles(positions, x.shape[-1] // 2, base)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.reshape(x.shape).astype(x.dtype)


def sinusoidal_positions(x: jax.Array, *, base: float = 10000.0) -> jax.Array:
    """Adds sines and cosines of the position to `x [batch, seq, embed]` (arXiv:1706.03762)."""
    seq, half = x.shape[1], x.shape[2] // 2
    frequency = base ** (-lax.broadcasted_iota(jnp.float32, (1, seq, half), 2) / half)
    angle = lax.broadcasted_iota(jnp.float32, (1, seq, half), 1) * frequency
    return x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(x.dtype)


def learned_positions(x: jax.Array, table: jax.Array) -> jax.Array:
    """Adds the first rows of a table `[context, embed]` to `x [batch, seq, embed]`."""
    return x + table[None, : x.shape[1]].astype(x.dtype)


def alibi(scores: jax.Array) -> jax.Array:
    """Scores `[batch, heads, seq, keys]` minus 2^(-8 (h + 1) / heads) times the distance (arXiv:2108.12409)."""
    shape = (1, *scores.shape[1:])
    head, query, key = (lax.broadcasted_iota(jnp.float32, shape, d) for d in (1, 2, 3))
    slopes = jnp.exp2(-8.0 * (head + 1.0) / shape[1])
    return scores - (slopes * jnp.abs(query - key)).astype(scores.dtype)


def relative_position_bias(table: jax.Array, *, seq: int, farthest: int = 16) -> jax.Array:
    """Looks up a bias `[1, heads, seq, seq]` by distance in a table `[buckets, heads]`, as in T5 (arXiv:1910.10683).

    Half of the buckets are for keys after the query. In each half, the first half of the buckets has one distance per
    bucket. Each further bucket covers a range of distances that is larger by a constant factor than the one before, up
    to `farthest`.
    """
    buckets = table.shape[0] // 2
    exact = buckets // 2
    offset = lax.broadcasted_iota(jnp.int32, (seq, seq), 1) - lax.broadcasted_iota(jnp.int32, (seq, seq), 0)
    distance = jnp.abs(offset)
    growth = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / np.log(farthest / exact)
    far = jnp.minimum(exact + (growth * (buckets - exact)).astype(jnp.int32), buckets - 1)
    bucket = jnp.where(distance < exact, distance, far) + jnp.where(offset > 0, buckets, 0)
    return jnp.moveaxis(table[bucket], 2, 0)[None]


def causal_mask(scores: jax.Array) -> jax.Array:
    """Scores `[batch, heads, seq, keys]` with those of later keys set to a large negative number."""
    query, key = (lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
    return jnp.where(query >= key, scores, jnp.full_like(scores, _MASKED))


def _gated(act: Callable[[jax.Array], jax.Array], x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array):
    """`(act(x gate) * (x up)) down` for x `[batch, seq, embed]`, gate and up `[embed, ffn]`, down `[ffn, embed]`."""
    hidden = act(jnp.einsum("bse,ef->bsf", x, gate)) * jnp.einsum("bse,ef->bsf", x, up)
    return jnp.einsum("bsf,fe->bse", hidden, down)


def feed_forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """`gelu(x up) down` for x `[batch, seq, embed]`, up `[embed, ffn]`, down `[ffn, embed]`."""
    return jnp.einsum("bsf,fe->bse", jax.nn.gelu(jnp.einsum("bse,ef->bsf", x, up)), down)


def _weights(*shape: int) -> np.ndarray:
    """Sample projections of a realistic size: with entries near 1, softmax would give all weight to one key."""
    return (0.1 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


_Q = f32(8, 12, 4, 16)
_KEYS = f32(8, 20, 4, 16)
_VISIBLE = np.arange(8 * 12 * 20).reshape(8, 1, 12, 20) * 7 % 5 > 0
_LENGTHS = np.arange(8, dtype=np.int32) + 5
_TABLE = (np.arange(16, dtype=np.int32) * 7 % 20).reshape(8, 2)
_POSITIONS = np.tile(np.arange(12, dtype=np.int32), (8, 1))
_X, _W, _OUT = f32(8, 12, 24), _weights(24, 4, 16), f32(4, 16, 24)
_FFN = (f32(24, 48), f32(24, 48), f32(48, 24))

OPERATORS: tuple[Operator, ...] = (
    Operator("attention", attention, (_Q, _KEYS, _KEYS), (0, 1, 2), "if the sequence is sharded, k and v are gathered"),
    Operator("causal_attention", causal_attention, (_Q, _Q, _Q), (0, 1, 2)),
    Operator("grouped_query_attention", causal_attention, (f32(8, 12, 8, 16), _Q, _Q), (0, 1, 2)),
    Operator("multi_query_attention", causal_attention, (_Q, f32(8, 12, 1, 16), f32(8, 12, 1, 16)), (0, 1, 2)),
    Operator("attention_with_mask", attention_with_mask, (_Q, _KEYS, _KEYS, _VISIBLE), (0, 1, 2)),
    Operator("attention_with_bias", attention, (_Q, _KEYS, _KEYS, f32(1, 4, 12, 20)), (0, 1, 2, 3)),
    Operator("sliding_window_attention", sliding_window_attention, (_Q, _Q, _Q), (0, 1, 2)),
    Operator("padded_attention", padded_attention, (_Q, _KEYS, _KEYS, _LENGTHS), (0, 1, 2)),
    Operator("soft_capped_attention", soft_capped_attention, (_Q, _KEYS, _KEYS), (0, 1, 2)),
    Operator("attention_with_sinks", attention_with_sinks, (_Q, _KEYS, _KEYS, f32(4)), (0, 1, 2, 3)),
    Operator("blockwise_attention", blockwise_attention, (_Q, _Q, _Q), (0, 1, 2)),
    Operator("linear_attention", linear_attention, (_Q, _KEYS, _KEYS), (0, 1, 2)),
    Operator("multi_head_attention", multi_head_attention, (_X, _W, _W, _W, _OUT), (0, 1, 2, 3, 4)),
    Operator(
        "cross_attention", cross_attention, (_X, f32(8, 20, 28), _W, _weights(28, 4, 16), _weights(28, 4, 16), _OUT),
        (0, 1, 2, 3, 4, 5),
    ),
    Operator(
        "latent_attention", latent_attention,
        (_X, _W, _weights(24, 20), _weights(20, 4, 16), _weights(20, 4, 16)), (0, 1, 2, 3, 4),
    ),
    Operator("kv_cache_update", kv_cache_update, (_KEYS, _KEYS, _Q, _Q, np.int32(4)), (0, 1, 2, 3)),
    Operator("ragged_cache_update", ragged_cache_update, (_KEYS, f32(8, 4, 16), _LENGTHS), (0, 1)),
    Operator("decode_attention", decode_attention, (f32(8, 4, 16), _KEYS, _KEYS, _LENGTHS), (0, 1, 2)),
    Operator(
        "paged_attention", paged_attention, (f32(8, 4, 16), f32(20, 12, 4, 16), f32(20, 12, 4, 16), _TABLE, _LENGTHS),
        (0, 1, 2),
    ),
    Operator("rope", rope, (_Q, _POSITIONS)),
    Operator("rope_interleaved", rope_interleaved, (_Q, _POSITIONS)),
    Operator("sinusoidal_positions", sinusoidal_positions, (_X,)),
    Operator("learned_positions", learned_positions, (_X, f32(20, 24)), (0, 1)),
    Operator("alibi", alibi, (f32(8, 4, 12, 20),)),
    Operator("relative_position_bias", partial(relative_position_bias, seq=12), (f32(16, 4),)),
    Operator("causal_mask", causal_mask, (f32(8, 4, 12, 20),)),
    Operator("feed_forward", feed_forward, (_X, f32(24, 48), f32(48, 24)), (0, 1, 2)),
    Operator("swiglu", partial(_gated, jax.nn.silu), (_X, *_FFN), (0, 1, 2, 3)),
    Operator("geglu", partial(_gated, jax.nn.gelu), (_X, *_FFN), (0, 1, 2, 3)),
    Operator("reglu", partial(_gated, jax.nn.relu), (_X, *_FFN), (0, 1, 2, 3)),
    Operator("bilinear_glu", partial(_gated, lambda x: x), (_X, *_FFN), (0, 1, 2, 3)),
)  # fmt: skip
