"""A step of two layers with each kind of parameter: norm scales, a router's gate, experts, biases, attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, BATCH, SEQ, HEADS, HEAD_DIM, EXPERTS, VOCAB = 2, 16, 16, 4, 4, 4, 32
EMBED = HEADS * HEAD_DIM
SHAPES = {
    "embed": (VOCAB, EMBED), "position": (SEQ, EMBED), "norm": (EMBED,), "scale": (LAYERS, EMBED),
    "qkv": (LAYERS, 3, EMBED, HEADS, HEAD_DIM), "out": (LAYERS, HEADS, HEAD_DIM, EMBED),
    "gate": (LAYERS, EMBED, EXPERTS), "up": (LAYERS, EXPERTS, EMBED, 24), "bias": (LAYERS, 24),
    "down": (LAYERS, EXPERTS, 24, EMBED),
}  # fmt: skip
OF_LAYERS = ("scale", "qkv", "out", "gate", "up", "bias", "down")


def arguments() -> tuple[dict[str, Any], Any]:
    """Return parameters in float32, and a batch of tokens."""
    rng = np.random.default_rng(0)
    params = {name: (rng.normal(size=shape) * 0.3).astype(np.float32) for name, shape in SHAPES.items()}
    return jax.tree.map(jnp.asarray, params), jnp.asarray(rng.integers(0, VOCAB, (BATCH, SEQ)), jnp.int32)


def layer(x: Any, w: Any) -> Any:
    """Apply causal attention, and soft experts."""
    h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["scale"]
    q, k, v = (jnp.einsum("bse,ehd->bhsd", h, each) for each in w["qkv"])
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / HEAD_DIM**0.5
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, jnp.finfo(x.dtype).min)
    x = x + jnp.einsum("bhqk,bhkd,hde->bqe", jax.nn.softmax(scores), v, w["out"])
    made = jnp.tanh(jnp.einsum("bse,xef->bsxf", x, w["up"]) + w["bias"])
    return x + jnp.einsum("bsxf,bsx,xfe->bse", made, jax.nn.softmax(x @ w["gate"]), w["down"])


def step(p: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """Return the updated parameters, the loss and the gradients."""

    def loss(p: Any) -> Any:
        x = p["embed"][tokens] + p["position"]
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, {name: p[name] for name in OF_LAYERS})
        logits = (x * p["norm"]) @ p["embed"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

    value, gradients = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), value, gradients
