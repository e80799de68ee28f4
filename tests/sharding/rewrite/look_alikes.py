"""Functions that look like attention and are not what a kernel computes. None of them may be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.sharding.rewrite.formulations import HEAD_DIM, HEADS, SEQ, Attention, causal

SCALE = HEAD_DIM**-0.5
POSITION = jnp.arange(SEQ)


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE


def weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def by_scores(change: Callable[[jax.Array], jax.Array]) -> Attention:
    return lambda q, k, v: weighted(jax.nn.softmax(change(scores_of(q, k))), v)


def by_weights(change: Callable[[jax.Array], jax.Array]) -> Attention:
    return lambda q, k, v: weighted(change(jnp.where(causal(), scores_of(q, k), -1e30)), v)


def by_mask(visible: Callable[[], Any]) -> Attention:
    return by_scores(lambda s: jnp.where(visible(), s, -1e30))


def permuted_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores_of(q, k[:, ::-1]))
    return weighted(weights[..., ::-1] * 1.0 + weights * 0.5, v)


def wrong_axis(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, k), axis=2), v)


def over_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, k), axis=1), v)


def transposed_weights(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, k)).swapaxes(2, 3), v)


def transposed_plus(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores_of(q, k))
    return weighted(weights + weights.swapaxes(2, 3), v)


def dropped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.key(3), 0.9, (8, HEADS, SEQ, SEQ))
    return weighted(jnp.where(keep, jax.nn.softmax(scores_of(q, k)) / 0.9, 0.0), v)


def biased_by_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    bias = jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q * q, k))
    return weighted(jax.nn.softmax(scores_of(q, k) + bias), v)


def biased_by_values(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, k) + v.sum(-1).transpose(0, 2, 1)[:, :, None]), v)


def masked_by_values(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    seen = (v[..., 0] > 0).transpose(0, 2, 1)[:, :, None]
    return weighted(jax.nn.softmax(jnp.where(seen, scores_of(q, k), -1e30)), v)


def returns_weights(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores_of(q, k))
    return weighted(weights, v) + 0.1 * (weights**2).sum(-1).transpose(0, 2, 1)[..., None]


def two_uses(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores_of(q, k))
    return weighted(weights, v) + weighted(weights, v * v)


def two_products(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, k) + scores_of(q * q, k * k)), v)


def differential(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, k)) - 0.3 * jax.nn.softmax(scores_of(k, q)), v)


def constrained(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mesh = jax.sharding.AbstractMesh((1,), ("a",))
    scores = lax.with_sharding_constraint(
        scores_of(q, k), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    return weighted(jax.nn.softmax(scores), v)


def same_operand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return weighted(jax.nn.softmax(scores_of(q, q)), v)


def sinks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    e = jnp.exp(scores_of(q, k))
    return weighted(e / (1.0 + e.sum(-1, keepdims=True)), v)


def own_gradient(wrong: Callable[..., Any]) -> Attention:
    """Attention with a backward pass by hand, in which one thing is wrong."""

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        weights = jax.nn.softmax(scores_of(q, k))
        return weighted(weights, v), (q, k, v, weights)

    def backward(saved: Any, d_out: jax.Array) -> Any:
        q, k, v, weights = saved
        d_v = jnp.einsum("bhqk,bqhd->bkhd", weights, d_out)
        d_weights = jnp.einsum("bqhd,bkhd->bhqk", d_out, v)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * SCALE
        return wrong(q, k, v, weights, d_weights, d_scores, d_v)

    attention.defvjp(forward, backward)
    return attention


def gradients(q: Any, k: Any, d_scores: Any) -> tuple[Any, Any]:
    return jnp.einsum("bhqk,bkhd->bqhd", d_scores, k), jnp.einsum("bhqk,bqhd->bkhd", d_scores, q)


LOOK_ALIKES: dict[str, Attention] = {
    fn.__name__: fn
    for fn in (
        permuted_keys, wrong_axis, over_heads, transposed_weights, transposed_plus, dropped, biased_by_queries,
        biased_by_values, masked_by_values, returns_weights, two_uses, two_products, differential, constrained,
        same_operand, sinks,
    )
} | {
    # The scores.
    "relative bias": by_scores(lambda s: s - 0.1 * jnp.abs(POSITION[:, None] - POSITION)),
    "alibi": by_scores(lambda s: s - jnp.arange(1, HEADS + 1)[:, None, None] * (POSITION[:, None] - POSITION) * 0.1),
    "squared scores": by_scores(lambda s: s * s),
    "clipped scores": by_scores(lambda s: jnp.clip(s, -50.0, 50.0)),
    "scores from below": by_scores(lambda s: jnp.maximum(s, -30.0)),
    "relu scores": by_scores(jax.nn.relu),
    "threshold": by_scores(lambda s: jnp.where(s > 40.0, s, s * 1.0)),
    "zero is hidden": by_scores(lambda s: jnp.where(s == 0.0, -1e30, s)),
    "rounded scores": by_scores(lambda s: s.astype(jnp.int8).astype(s.dtype) + s * 0.5),
    "sine": by_scores(jnp.sin),
    "negative scale": by_scores(lambda s: -s),
    "mixed heads": by_scores(lambda s: s + s[:, ::-1]),
    "centred scores of all heads": by_scores(lambda s: s - s * s.mean(1, keepdims=True)),
    "other cap": by_scores(lambda s: 5.0 * s / (1.0 + jnp.abs(s))),
    # The mask.
    "anti-causal": by_mask(lambda: POSITION[:, None] <= POSITION),
    "strictly causal": by_mask(lambda: (POSITION[:, None] > POSITION) | ((POSITION == 0) & (POSITION[:, None] == 0))),
    "one too far": by_mask(lambda: POSITION[:, None] + 1 >= POSITION),
    "dilated": by_mask(lambda: (POSITION[:, None] - POSITION) % 2 == 0),
    "chunks": by_mask(lambda: POSITION[:, None] // 6 == POSITION // 6),
    "causal chunks": by_mask(lambda: causal() & (POSITION[:, None] // 12 == POSITION // 12)),
    "one pair more": by_mask(lambda: causal().at[3, 20].set(True)),
    "one pair less": by_mask(lambda: causal().at[20, 3].set(False)),
    "prefix": by_mask(lambda: causal() | (POSITION < 5)),
    "padding": by_mask(lambda: POSITION < 20),
    "other mask for a head": by_mask(lambda: causal() | (jnp.arange(HEADS) == 1)[:, None, None]),
    "shallow mask": by_scores(lambda s: jnp.where(causal(), s, -4.0)),
    "graded mask": by_scores(lambda s: s + jnp.where(causal(), 0.0, jnp.where(POSITION > 9, -1e9, -2.0))),
    # The weights.
    "no normalization": by_weights(jnp.exp),
    "divided by the count": by_weights(lambda s: jnp.exp(s) / SEQ),
    "epsilon": by_weights(lambda s: jnp.exp(s) / (jnp.exp(s).sum(-1, keepdims=True) + 1e-6)),
    "appended sinks": by_weights(
        lambda s: jax.nn.softmax(jnp.concatenate([s, jnp.ones((*s.shape[:-1], 1), s.dtype)], -1))[..., :-1]
    ),
    "normalized by squares": by_weights(lambda s: jnp.exp(s) / jnp.sqrt((jnp.exp(s) ** 2).sum(-1, keepdims=True))),
    "sigmoid": by_weights(jax.nn.sigmoid),
    "weights squared": by_weights(lambda s: jax.nn.softmax(s) ** 2),
    "log softmax": by_weights(lambda s: jax.nn.log_softmax(jnp.where(causal(), s, 0.0))),
    "twice softmax": by_weights(lambda s: jax.nn.softmax(jax.nn.softmax(s))),
    "weights less a part": by_weights(lambda s: jax.nn.softmax(s) * 0.999),
    "threshold of weights": by_weights(lambda s: jnp.where(jax.nn.softmax(s) > 1e-9, jax.nn.softmax(s), 0.0)),
    "stopped gradient": by_weights(lambda s: lax.stop_gradient(jax.nn.softmax(s))),
    "half stopped": by_weights(lambda s: 0.5 * jax.nn.softmax(s) + 0.5 * lax.stop_gradient(jax.nn.softmax(s))),
    "reversed": by_weights(lambda s: jax.nn.softmax(s)[..., ::-1]),
    "sorted": by_weights(lambda s: lax.top_k(jax.nn.softmax(s), SEQ)[0]),  # an operator with several results
    # The backward pass.
    "missing scale": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, ds / SCALE), dv)),
    "missing sum": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, w * dw * SCALE), dv)),
    "wrong sign": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, -ds), dv)),
    "transposed gradient": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, ds.swapaxes(2, 3)), dv)),
    "clipped gradient": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, jnp.clip(ds, -9, 9)), dv)),
    "values of squares": own_gradient(
        lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, ds), jnp.einsum("bhqk,bqhd->bkhd", w * w, v))
    ),
}  # fmt: skip

# The products are those of attention, and what the program makes of them stays.
REPLACED: dict[str, Attention] = {
    "gradients swapped afterwards": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, ds)[::-1], dv)),
    "gradient doubled afterwards": own_gradient(lambda q, k, v, w, dw, ds, dv: (*gradients(q, k, ds), 2 * dv)),
    "scaled by one": by_weights(lambda s: jax.nn.softmax(s * (1 + lax.stop_gradient(s.max()) * 0))),
}
