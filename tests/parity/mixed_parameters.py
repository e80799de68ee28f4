"""A step with each kind of parameter: a tied embedding, positions, a norm's scale, a router's gate, experts, a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def shapes(seq: int, width: int, hidden: int, vocab: int, experts: int, frozen: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters; `frozen` has no gradient."""
    return {
        "embed": (vocab, width), "position": (seq, width), "scale": (width,), "gate": (width, experts),
        "up": (experts, width, hidden), "bias": (hidden,), "down": (experts, 3 * hidden, width), "frozen": (frozen,),
    }  # fmt: skip


def arguments(found: Mapping[str, tuple[int, ...]], batch: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return parameters of these shapes, and a batch of tokens."""
    rng = np.random.default_rng(0)
    params = {name: (rng.normal(size=shape) * 0.1).astype(np.float32) for name, shape in found.items()}
    return params, rng.integers(0, found["embed"][0], (batch, found["position"][0])).astype(np.int32)


def loss(p: Any, tokens: Any) -> jax.Array:
    """Soft experts between a tied embedding."""
    x = p["embed"][tokens]
    x = x + p["position"]
    h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
    weight = jax.nn.softmax(h @ p["gate"])
    h = jnp.einsum("bsd,edf->bsef", h, p["up"])
    h = jnp.tanh(h + p["bias"])
    h = jnp.concatenate([h, h * h, h**3], -1)
    x = x + jnp.einsum("bsef,bse,efd->bsd", h, weight, p["down"]) * p["frozen"].mean()
    logits = x @ p["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def gradients_of(p: Any, tokens: Any) -> dict[str, jax.Array]:
    """Return the gradients of the trained parameters."""
    trained = {k: v for k, v in p.items() if k != "frozen"}
    return jax.grad(lambda t: loss({**t, "frozen": p["frozen"]}, tokens))(trained)


def step(p: Any, tokens: Any) -> dict[str, jax.Array]:
    """Return the parameters after a step of gradient descent."""
    gradients = gradients_of(p, tokens)
    return {**{name: p[name] - 0.1 * g for name, g in gradients.items()}, "frozen": p["frozen"]}
