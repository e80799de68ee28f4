"""Losses with loops that use the same weights in every iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, SEQ, BATCH = 32, 6, 16
Loss = Callable[[Any, Any], jax.Array]
Shapes = Mapping[str, tuple[int, ...]]


def lstm(p: Any, x: jax.Array) -> jax.Array:
    """Two layers of LSTMs, `[batch, seq, width]`, whose gates are one product."""
    for layer in range(2):
        inputs = jnp.einsum("btd,dgk->tbgk", x, p[f"kernel{layer}"]) + p[f"bias{layer}"]

        def cell(carry: Any, now: Any, layer: int = layer) -> Any:
            hidden, memory = carry
            gates = now + jnp.einsum("bd,dgk->bgk", hidden, p[f"recurrent{layer}"])
            keep, write, show, value = jnp.moveaxis(gates, 1, 0)
            memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(write) * jnp.tanh(value)
            hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros((len(x), WIDTH), x.dtype)
        x = x + lax.scan(cell, (zeros, zeros), inputs)[1].swapaxes(0, 1)
    return jnp.mean((x @ p["head"]) ** 2)


def gru(p: Any, x: jax.Array) -> jax.Array:
    """A gated unit that reads the sequence backwards, with its products and biases in the loop, in bfloat16."""

    def cell(h: jax.Array, now: jax.Array) -> Any:
        update, reset, new = (p[name].astype(h.dtype) for name in ("update", "reset", "new"))
        z = jax.nn.sigmoid(jnp.concatenate([now, h], -1) @ update + p["bias"].astype(h.dtype))
        r = jax.nn.sigmoid(jnp.concatenate([now, h], -1) @ reset)
        n = jnp.tanh(jnp.concatenate([now, r * h], -1) @ new)
        return (1 - z) * n + z * h, h

    start = jnp.zeros((len(x), WIDTH), x.dtype)
    last, states = lax.scan(cell, start, x.swapaxes(0, 1), reverse=True)
    return jnp.mean(states**2) + jnp.mean((last @ p["head"]) ** 2)


def shared_layers(p: Any, x: jax.Array) -> jax.Array:
    """One layer that runs three times, as in ALBERT, checkpointed, and two layers in each iteration."""

    @jax.checkpoint
    def layers(x: jax.Array, _: None) -> Any:
        x = x + jax.nn.gelu(x @ p["up0"]) @ p["down0"] * p["scale"]
        return x + jax.nn.gelu(x @ p["up1"]) @ p["up1"].T, None

    x, _ = lax.scan(layers, x, length=3)
    return jnp.mean((x @ p["head"]) ** 2)


LOSSES: Mapping[str, tuple[Loss, Shapes]] = {
    "lstm": (lstm, {f"{name}{n}": (WIDTH, 4, WIDTH) for name in ("kernel", "recurrent") for n in range(2)}
             | {f"bias{n}": (4, WIDTH) for n in range(2)} | {"head": (WIDTH, 2 * WIDTH)}),
    "gru": (gru, {name: (2 * WIDTH, WIDTH) for name in ("update", "reset", "new")}
            | {"bias": (WIDTH,), "head": (WIDTH, 2 * WIDTH)}),
    "shared": (shared_layers, {f"up{n}": (WIDTH, 4 * WIDTH) for n in range(2)}
               | {"down0": (4 * WIDTH, WIDTH), "scale": (WIDTH,), "head": (WIDTH, 2 * WIDTH)}),
}  # fmt: skip


def arguments(name: str) -> tuple[Any, Any]:
    """Return the weights and the batch of a loss."""
    random = np.random.default_rng(0)
    shapes = LOSSES[name][1]
    weights = {k: random.normal(size=s).astype(np.float32) / s[0] ** 0.5 for k, s in shapes.items()}
    return weights, random.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)


def step_of(name: str) -> Callable[..., Any]:
    """Return a step of gradient descent with momentum, which also returns the loss and all gradients."""
    loss = LOSSES[name][0]

    def step(state: Any, x: Any) -> Any:
        weights, momentum = state
        value, gradients = jax.value_and_grad(loss)(weights, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return (jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum), (value, gradients)

    return step
