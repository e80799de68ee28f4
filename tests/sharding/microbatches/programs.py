"""Train steps in plain JAX, with what matters when a batch is cut: masks, dropout, statistics over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

BATCH, SEQ, EMBED, LAYERS, VOCAB = 8, 8, 16, 2, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
REMAT: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "full": jax.checkpoint,
    "dots": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}


def params(dtype: Any = jnp.float32) -> Any:
    """Return the parameters of two layers, and of a tied embedding."""
    keys = iter(jax.random.split(jax.random.key(1), 4))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype) * 0.3  # noqa: E731
    layers = {
        "q": draw(LAYERS, EMBED, EMBED),
        "up": draw(LAYERS, EMBED, 2 * EMBED),
        "down": draw(LAYERS, 2 * EMBED, EMBED),
    }
    return {"embedding": draw(VOCAB, EMBED), "layers": layers}


def tokens() -> Any:
    """Return a batch; token 0 does not count in the masked loss."""
    return jax.random.randint(jax.random.key(0), (BATCH, SEQ), 0, VOCAB)


def make_step(kind: str = "plain", remat: str = "none", unrolled: bool = False, parts: int = 1) -> Any:
    """Return `step(state, tokens) -> (state, loss)`, with `state` the parameters and the optimizer's state.

    The loss is the mean of those of `parts` of the batch; part m has the rows m, m + parts, ...
    """

    def layer(carry: Any, xs: Any) -> Any:
        (x, aux), (weights, key) = carry, xs
        scores = jnp.einsum("bqe,bke->bqk", x @ weights["q"], x)
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e30)
        x = x + jax.nn.softmax(scores) @ x
        if kind == "batch norm":
            x = x - x.mean((0, 1))
        if kind == "dropout":
            x = x * jax.random.bernoulli(key, 0.9, x.shape)
        if kind == "auxiliary":
            aux = aux + (x**2).mean()
        if kind == "load balance":
            gates = jax.nn.softmax(x @ weights["q"]).mean((0, 1))
            aux = aux + (gates * gates).sum()
        if kind == "flat":
            x = (x.reshape(BATCH * SEQ, EMBED) @ weights["q"]).reshape(x.shape)
        return (x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], aux), None

    def loss(weights: Any, batch: Any) -> Any:
        carry = weights["embedding"][batch], jnp.zeros((), weights["embedding"].dtype)
        keys = jax.random.split(jax.random.key(0), LAYERS)
        if unrolled:
            for i in range(LAYERS):
                carry, _ = REMAT[remat](layer)(carry, (jax.tree.map(lambda a: a[i], weights["layers"]), keys[i]))  # noqa: B023
        else:
            carry, _ = jax.lax.scan(REMAT[remat](layer), carry, (weights["layers"], keys))
        x, aux = carry
        if kind == "head norm":
            x = x - x.mean((0, 1))
        if kind == "contrastive":
            return -jnp.trace(jax.nn.log_softmax(x.mean(1) @ x.mean(1).T))
        logits = jax.nn.log_softmax(x @ weights["embedding"].T)
        losses = -jnp.take_along_axis(logits, jnp.roll(batch, -1, 1)[..., None], -1)[..., 0]
        if kind == "masked":
            return (losses * (batch != 0)).sum() / (batch != 0).sum()
        return losses.mean() + 0.01 * aux

    def step(state: Any, batch: Any) -> Any:
        weights, moments = state
        mean = lambda w: sum(loss(w, batch[m::parts]) for m in range(parts)) / parts  # noqa: E731
        value, gradients = jax.value_and_grad(mean)(weights)
        updates, moments = OPTIMIZER.update(gradients, moments, weights)
        state = optax.apply_updates(weights, updates), moments
        if kind == "rows":
            return state, value, weights["embedding"][batch][:, :, 0]
        return state, value

    return step


def state(dtype: Any = jnp.float32) -> Any:
    """Return the initial state of a step."""
    return params(dtype), OPTIMIZER.init(params(dtype))
