"""Train steps in plain JAX, with what matters when layers are cut into stages: side inputs, sums, tied and frozen
weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

BATCH, SEQ, EMBED, HIDDEN, LAYERS, VOCAB = 8, 6, 8, 16, 4, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
KINDS = ("plain", "tied", "dropout", "mask", "frozen", "auxiliary", "experts", "encoder", "shared", "hidden")


def state(dtype: Any = jnp.float64, unrolled: bool = False) -> Any:
    """Return the parameters, and the state of the optimizer.

    Args:
        dtype: the type of the parameters.
        unrolled: whether the layers are a list.
    """
    keys = iter(jax.random.split(jax.random.key(1), 16))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype) * 0.3  # noqa: E731
    layers = {
        "q": draw(LAYERS, EMBED, EMBED),
        "k": draw(LAYERS, EMBED, EMBED),
        "up": draw(LAYERS, 2, EMBED, HIDDEN),
        "down": draw(LAYERS, 2, HIDDEN, EMBED),
        "router": draw(LAYERS, EMBED, 2),
    }
    weights = {
        "embedding": draw(VOCAB, EMBED),
        "head": draw(EMBED, VOCAB),
        "encoder": draw(EMBED, EMBED),
        "shared": draw(EMBED, EMBED),
        "layers": [jax.tree.map(lambda w, n=n: w[n], layers) for n in range(LAYERS)] if unrolled else layers,
    }
    return weights, OPTIMIZER.init(weights)


def tokens() -> Any:
    """Return a batch."""
    return jax.random.randint(jax.random.key(0), (BATCH, SEQ), 0, VOCAB)


def run_layers(body: Any, carry: Any, weights: Any, keys: Any, unrolled: bool) -> Any:
    """Run all layers, as `jax.lax.scan` or one after another."""
    if not unrolled:
        return jax.lax.scan(body, carry, (weights, keys))
    made = []
    for n in range(LAYERS):
        own = weights[n] if isinstance(weights, list) else jax.tree.map(lambda w, n=n: w[n], weights)
        carry, y = body(carry, (own, keys[n]))
        made.append(y)
    return carry, jnp.stack(made)


def make_step(kind: str = "plain", remat: bool = False, unrolled: bool = False) -> Any:
    """Return `step(state, tokens) -> (state, loss, gradients)`."""

    def layer(carry: Any, xs: Any, side: Any) -> Any:
        (x, aux), (weights, key) = carry, xs
        if kind == "frozen":
            weights = {**weights, "q": jax.lax.stop_gradient(weights["q"])}
        scores = jnp.einsum("bqe,bke->bqk", x @ weights["q"], x @ weights["k"])
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e30)
        x = x + jax.nn.softmax(scores) @ x
        if kind == "encoder":
            x = x + side["encoded"]
        if kind == "shared":
            x = x + jnp.tanh(x @ side["shared"])
        gates = jax.nn.softmax(x @ weights["router"])
        experts = range(2) if kind == "experts" else [0]
        hidden = [jax.nn.gelu(x @ weights["up"][i]) @ weights["down"][i] for i in experts]
        y: Any = sum(gates[..., i : i + 1] * h for i, h in enumerate(hidden))
        if kind == "dropout":
            y = y * jax.random.bernoulli(key, 0.8, y.shape) / 0.8
        if kind == "mask":
            y = jnp.where(side["mask"], y, 0)
        return (x + y, aux + (gates**2).sum()), (y**3).sum()

    def loss(weights: Any, batch: Any) -> Any:
        x = weights["embedding"][batch]
        side = {
            "mask": (batch > 2)[..., None],
            "encoded": jnp.tanh(x @ weights["encoder"]),
            "shared": weights["shared"],
        }
        body = lambda carry, xs: layer(carry, xs, side)  # noqa: E731
        keys = jax.random.split(jax.random.key(0), LAYERS)
        carry = x, jnp.zeros((), x.dtype)
        body = jax.checkpoint(body) if remat else body
        (x, aux), cubes = run_layers(body, carry, weights["layers"], keys, unrolled)
        head = weights["embedding"].T if kind == "tied" else weights["head"]
        logits = jax.nn.log_softmax(x @ head)
        losses = -jnp.take_along_axis(logits, jnp.roll(batch, -1, 1)[..., None], -1)
        value = losses.mean()
        if kind == "auxiliary":
            value = value + 1e-2 * aux / batch.size + 1e-3 * (cubes * jnp.arange(LAYERS)).sum()
        return value, x if kind == "hidden" else ()

    def step(state: Any, batch: Any) -> Any:
        weights, moments = state
        (value, more), gradients = jax.value_and_grad(loss, has_aux=True)(weights, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value, gradients, more

    return step
