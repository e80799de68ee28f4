"""Attention with masks that are arrays, as people write it: padding, packed documents, alone and with a causal mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

from tests.sharding.rewrite.formulations import BATCH, HEAD_DIM, LAYERS, POLICIES, SEQ, causal

MaskedAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def weighted(scores: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5


def chosen(mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jnp.where(mask, scores_of(q, k), -1e30), v)


def documents(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return chosen((segments[:, :, None] == segments[:, None, :])[:, None], q, k, v)


def causal_documents(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return chosen((segments[:, :, None] == segments[:, None, :])[:, None] & causal(), q, k, v)


def nested_choices(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    scores = jnp.where(causal(), scores_of(q, k), -1e30)
    return weighted(jnp.where(segments[:, None, None, :] == segments[:, None, :, None], scores, -1e30), v)


def padding(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return chosen((tokens > 0)[:, None, None, :], q, k, v)


def hides_padding(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    scores = jnp.where((tokens == 0)[:, None, None, :], jnp.finfo(jnp.float32).min, scores_of(q, k))
    return weighted(jnp.where(causal(), scores, jnp.finfo(jnp.float32).min), v)


def shared_padding(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    """One row for the whole batch: all queries see keys, or none does."""
    return chosen((tokens[0] > 0)[None, None, None, :], q, k, v)


def causal_padding(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return chosen(jnp.where((tokens > 0)[:, None, None, :], causal(), False), q, k, v)


def padded_documents(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    same = (segments[:, :, None] == segments[:, None, :]) & (tokens != 0)[:, None, :]
    return chosen((same & causal()[None])[:, None], q, k, v)


def two_segments(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    image = tokens % 3
    return chosen(
        ((segments[:, :, None] == segments[:, None]) & (image[:, :, None] == image[:, None]))[:, None], q, k, v
    )


def lengths(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    real = jnp.arange(SEQ)[None] < jnp.sum(tokens > 0, axis=1)[:, None]
    return chosen(real[:, None, :, None] & real[:, None, None, :], q, k, v)


def added(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    mask = jnp.broadcast_to((tokens > 0)[:, None, None, :], (BATCH, 1, SEQ, SEQ)) & causal()
    bias = lax.select(mask, jnp.zeros(mask.shape), jnp.full(mask.shape, jnp.finfo(jnp.float32).min))
    return weighted(scores_of(q, k) + bias, v)


def added_by_numbers(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    mask = (tokens > 0).astype(jnp.float32)[:, None, None, :]
    return weighted((1.0 - mask) * jnp.finfo(jnp.float32).min + scores_of(q, k), v)


def flax_linen(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    mask = linen.combine_masks(
        linen.make_attention_mask(segments, segments, jnp.equal),
        linen.make_attention_mask(tokens > 0, tokens > 0),
        linen.make_causal_mask(tokens),
    )
    return linen.dot_product_attention(q, k, v, mask=mask)


def flax_nnx(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return nnx.dot_product_attention(q, k, v, mask=nnx.make_attention_mask(segments, segments, jnp.equal))


def jax_nn(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q, k[:, :, ::2], v[:, :, ::2], mask=mask, is_causal=True)


def key_lengths(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.sum(tokens > 0, axis=1))


def other_rows(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    """Queries compared with keys of another sequence: the kernel gets exactly these segments."""
    return chosen((segments[::-1, :, None] == segments[:, None, :])[:, None], q, k, v)


def moved_by_one(q: Any, k: Any, v: Any, segments: Any, tokens: Any) -> jax.Array:
    return chosen((jnp.roll(segments, 1, axis=1)[:, :, None] == segments[:, None, :])[:, None], q, k, v)


MASKED: dict[str, MaskedAttention] = {
    fn.__name__: fn
    for fn in (
        documents, causal_documents, nested_choices, padding, hides_padding, shared_padding, causal_padding,
        padded_documents, two_segments, lengths, added, added_by_numbers, flax_linen, flax_nnx, jax_nn, key_lengths,
        other_rows, moved_by_one,
    )
}  # fmt: skip

# Masks that no pair of segments expresses, and rows that a kernel would compute in another way.
LEFT: dict[str, MaskedAttention] = {
    "other documents": lambda q, k, v, s, t: chosen((s[:, :, None] != s[:, None, :])[:, None], q, k, v),
    "earlier documents": lambda q, k, v, s, t: chosen((s[:, :, None] >= s[:, None, :])[:, None], q, k, v),
    "next document": lambda q, k, v, s, t: chosen((s[:, :, None] - s[:, None, :] == 1)[:, None], q, k, v),
    "either": lambda q, k, v, s, t: chosen(
        ((s[:, :, None] == s[:, None, :]) | (t > 0)[:, None, :])[:, None], q, k, v
    ),
    "not both": lambda q, k, v, s, t: chosen(~((t > 0)[:, :, None] & (t > 0)[:, None, :])[:, None], q, k, v),
    "heads differ": lambda q, k, v, s, t: chosen(
        (t[:, None, :] > jnp.arange(q.shape[2])[None, :, None])[:, :, None], q, k, v
    ),
    "documents of heads": lambda q, k, v, s, t: chosen(
        s[:, None, :, None] == (s[:, None, :] * jnp.arange(1, q.shape[2] + 1)[None, :, None])[:, :, None], q, k, v
    ),
    "anti-causal documents": lambda q, k, v, s, t: chosen(
        (s[:, :, None] == s[:, None, :])[:, None] & causal().T, q, k, v
    ),
    "causal, one too far": lambda q, k, v, s, t: chosen(
        (s[:, :, None] == s[:, None, :])[:, None] & jnp.tril(jnp.ones((SEQ, SEQ), bool), 1), q, k, v
    ),
    "causal for one alone": lambda q, k, v, s, t: weighted(
        jnp.where((s[:, :, None] == s[:, None, :])[:, None], jnp.where(causal(), scores_of(q, k), -4.0), -1e30), v
    ),
    "floats": lambda q, k, v, s, t: chosen(
        (jnp.sqrt(s * 1.0)[:, :, None] == jnp.sqrt(s * 1.0)[:, None, :])[:, None], q, k, v
    ),
    "minus infinity": lambda q, k, v, s, t: weighted(
        jnp.where((t > 0)[:, None, None, :], scores_of(q, k), -jnp.inf), v
    ),
    "small bias": lambda q, k, v, s, t: weighted(
        jnp.where((t > 0)[:, None, None, :], 0.0, -1e9) + scores_of(q, k), v
    ),
    "shallow": lambda q, k, v, s, t: weighted(jnp.where((t > 0)[:, None, None, :], scores_of(q, k), -3.0), v),
    "two depths": lambda q, k, v, s, t: weighted(
        jnp.where(causal(), jnp.where((t > 0)[:, None, None, :], scores_of(q, k), -1e20), -1e30), v
    ),
    "numbers": lambda q, k, v, s, t: weighted(
        (1.0 - t[:, None, None, :]) * jnp.finfo(jnp.float32).min + scores_of(q, k), v
    ),
    "number above one": lambda q, k, v, s, t: chosen(((t > 0) * 2 - 1 > 0)[:, None, None, :] ^ causal(), q, k, v),
    "of the weights": lambda q, k, v, s, t: jnp.einsum(
        "bhqk,bkhd->bqhd", jnp.where((t > 0)[:, None, None, :], jax.nn.softmax(scores_of(q, k)), 0.0), v
    ),
    "capped sum": lambda q, k, v, s, t: weighted(
        5.0 * jnp.tanh(scores_of(q, k) / 5.0) + jnp.where((t > 0)[:, None, None, :], 0.0, jnp.finfo(jnp.float32).min), v
    ),
    "diagonal": lambda q, k, v, s, t: chosen(
        jnp.diagonal(s[:, :, None] * t[:, None, :], axis1=1, axis2=2)[:, None, None] == s[:, None, :, None], q, k, v
    ) + weighted(jnp.where(scores_of(q, k) > 0.5, scores_of(q, k), -1e30), v),
    "random keys": lambda q, k, v, s, t: chosen(
        jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), t[0, 0]), 0.9, (BATCH, 1, 1, SEQ)), q, k, v
    ),
}  # fmt: skip


def batch_arrays() -> tuple[jax.Array, jax.Array]:
    """Segments of packed documents, and tokens with padding at both ends; one sequence is padding alone."""
    position = jnp.arange(SEQ)[None]
    row = jnp.arange(BATCH)[:, None]
    segments = (position * (row + 2) // SEQ).astype(jnp.int32) % 3
    tokens = jnp.where((position < 20 - row) & (position >= row // 2), position + 1, 0)
    return segments, tokens.at[-1].set(0)


def masked_loss_of(attention: MaskedAttention, policy: str = "none", *, unrolled: bool = False) -> Callable[..., Any]:
    def layer(x: jax.Array, w: Any, segments: jax.Array, tokens: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[n]) for n in ("q", "k", "v"))
        return x + jnp.tanh(jnp.einsum("bshd,hde->bse", attention(q, k, v, segments, tokens), w["out"]))

    body = layer if policy == "none" else jax.checkpoint(layer, policy=POLICIES[policy])

    def loss(params: Any, x: jax.Array, segments: jax.Array, tokens: jax.Array) -> jax.Array:
        if unrolled:
            for n in range(LAYERS):
                x = body(x, jax.tree.map(lambda w, n=n: w[n], params), segments, tokens)
        else:
            x, _ = lax.scan(lambda x, w: (body(x, w, segments, tokens), None), x, params)
        return jnp.mean(x**2)

    return loss


def masked_step_of(attention: MaskedAttention, policy: str = "none", *, unrolled: bool = False) -> Callable[..., Any]:
    return jax.value_and_grad(masked_loss_of(attention, policy, unrolled=unrolled), argnums=(0, 1))
