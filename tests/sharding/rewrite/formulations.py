"""Attention as people write it, and models around it: scanned or unrolled layers, with and without recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from equinox.nn._attention import dot_product_attention as equinox_attention  # what `eqx.nn.MultiheadAttention` runs
from flax import linen, nnx
from jax import lax

BATCH, SEQ, HEADS, HEAD_DIM, LAYERS = 8, 24, 4, 6, 2
WIDTH = HEADS * HEAD_DIM - 2  # SEQ is the size of the scores' dimensions alone

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((SEQ, SEQ), bool))


def einsum_where(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal(), scores, -1e30)), v)


def einsum_no_mask(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bqhk", q * HEAD_DIM**-0.5, k), axis=-1)
    return jnp.einsum("bqhk,bkhd->bqhd", weights, v)


def mask_plus_scores(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    position = jnp.arange(SEQ)
    bias = jnp.where(position[:, None] >= position[None], 0.0, -1e9)
    weights = jax.nn.softmax(bias + HEAD_DIM**-0.5 * jnp.einsum("bkhd,bqhd->bhqk", k, q), axis=-1)
    return jnp.einsum("bkhd,bhqk->bqhd", v, weights)


def soft_cap_by_hand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = 20.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhkq", q, k) * 0.4 / 20.0)
    position = lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    scores = jnp.where(position >= lax.broadcasted_iota(jnp.int32, scores.shape, 2), scores, -jnp.inf)
    e = jnp.exp(scores - lax.stop_gradient(scores.max(2, keepdims=True)))
    return jnp.einsum("bhkq,bkhd->bqhd", e / e.sum(2, keepdims=True), v)


def divided_late(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


def window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    ahead = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
    scores = jnp.where((ahead >= 0) & (ahead < 7), scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def float32_inside(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * HEAD_DIM**-0.5
    weights = jax.nn.softmax(jnp.where(causal(), scores, -1e9)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(jnp.float32)


def dot_generals(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = lax.dot_general(k, q, (((3,), (3,)), ((0, 2), (0, 2)))) * HEAD_DIM**-0.5  # batch, heads, keys, queries
    scores = scores + jnp.where(causal().T, 0.0, -1e9)
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, axis=2, keepdims=True))
    return jnp.transpose(lax.dot_general(weights, v, (((2,), (1,)), ((0, 1), (0, 2)))), (0, 2, 1, 3))


def jax_nn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def grouped_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k[:, :, ::2], v[:, :, ::2], is_causal=True, scale=0.5)


def bonsai(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = k[:, :, :2], v[:, :, :2]
    grouped = q.reshape(*q.shape[:2], 2, HEADS // 2, HEAD_DIM)
    logits = jnp.einsum("BTKGH,BSKH->BTSKG", grouped, k) * HEAD_DIM**-0.5
    mask = jnp.arange(SEQ)[None, :, None] >= jnp.arange(SEQ)[None, None, :]
    logits = jnp.where(mask[:, :, :, None, None], logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits.astype(jnp.float32), axis=2).astype(logits.dtype)
    return jnp.einsum("BTSKG,BSKH->BTKGH", weights, v).reshape(q.shape)


def flax_linen(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return linen.dot_product_attention(q, k, v, mask=linen.make_causal_mask(jnp.ones((1, SEQ))))


def flax_nnx(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(jnp.ones((1, SEQ))))


def hugging_face(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = linen.make_causal_mask(jnp.ones((1, 2 * SEQ), "bool"), dtype="bool")[:, :, :SEQ, :SEQ]
    bias = lax.select(
        jnp.broadcast_to(mask, (BATCH, 1, SEQ, SEQ)) > 0,
        jnp.full((BATCH, 1, SEQ, SEQ), 0.0),
        jnp.full((BATCH, 1, SEQ, SEQ), jnp.finfo(jnp.float32).min),
    )
    weights = linen.dot_product_attention_weights(q, k, bias=bias, dtype=jnp.float32)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def equinox(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return equinox_attention(q, k, v, causal())

    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


def heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = (q * HEAD_DIM**-0.5) @ k.swapaxes(-1, -2)
    weights = jax.nn.softmax(jnp.where(causal()[None, None], scores, -jnp.inf), -1)
    return (weights @ v).transpose(0, 2, 1, 3)


FORMULATIONS: dict[str, Attention] = {
    fn.__name__: fn
    for fn in (
        einsum_where, einsum_no_mask, mask_plus_scores, soft_cap_by_hand, divided_late, window, float32_inside,
        dot_generals, jax_nn, grouped_queries, bonsai, flax_linen, flax_nnx, hugging_face, equinox, heads_first,
    )
}  # fmt: skip

POLICIES: dict[str, Any] = {"none": None, "full": jax.checkpoint_policies.nothing_saveable,
                            "dots": jax.checkpoint_policies.dots_saveable}  # fmt: skip


def parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {n: (LAYERS, WIDTH, HEADS, HEAD_DIM) for n in ("q", "k", "v")} | {"out": (LAYERS, HEADS, HEAD_DIM, WIDTH)}
    return {n: jax.random.normal(key, s) * 0.3 for key, (n, s) in zip(keys, shapes.items(), strict=True)}


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (BATCH, SEQ, WIDTH))


def loss_of(attention: Attention, policy: str = "none", *, unrolled: bool = False) -> Callable[..., jax.Array]:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[n]) for n in ("q", "k", "v"))
        return x + jnp.tanh(jnp.einsum("bshd,hde->bse", attention(q, k, v), w["out"])), None

    body = layer if policy == "none" else jax.checkpoint(layer, policy=POLICIES[policy])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if unrolled:
            for n in range(LAYERS):
                x, _ = body(x, jax.tree.map(lambda w, n=n: w[n], params))
        else:
            x, _ = lax.scan(body, x, params)
        return jnp.mean(x**2)

    return loss


def step_of(attention: Attention, policy: str = "none", *, unrolled: bool = False) -> Callable[..., Any]:
    return jax.value_and_grad(loss_of(attention, policy, unrolled=unrolled), argnums=(0, 1))
