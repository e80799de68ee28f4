"""Train steps whose layers have experts or attention, for plans that shard those within the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.visibility import Visibility
from autoshard.models.dropless import experts

BATCH, SEQ, EMBED, HIDDEN, LAYERS, EXPERTS, KV_HEADS, GROUP, HEAD_DIM = 16, 32, 16, 32, 4, 4, 2, 2, 8


def layer(kind: str, x: Any, weights: Any, documents: Any) -> Any:
    """Apply a layer to `[batch, seq, embed]`.

    Args:
        kind: `dropless`, experts as an operator; `capacity`, experts in plain JAX, one slot for each token;
            `attention`, causal and within documents; `window`, causal with a window.
        x: the activations.
        weights: the weights of one layer.
        documents: the document of each position, `[batch, seq]`.
    """
    if kind in ("attention", "window"):
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, weights[name]) for name in "qkv")
        q = q.reshape(*x.shape[:2], KV_HEADS, GROUP, HEAD_DIM)
        visible = Visibility(causal=True, window=6 if kind == "window" else None)
        pair = (documents, documents) if kind == "attention" else None
        y = splash_attention(Softmax(visible, HEAD_DIM**-0.5), q, k, v, plain=True, segments=pair)
        return x + jnp.einsum("bskgd,kgde->bse", y, weights["o"])
    best, chosen = jax.lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
    if kind == "dropless":
        return x + experts(x, best, chosen, weights["up"], weights["down"])
    gates = (jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype) * best[..., None]).sum(2)
    sent = jnp.einsum("bse,st,bsd->ebtd", (gates > 0).astype(x.dtype), jnp.eye(SEQ, dtype=x.dtype), x)
    made = jnp.einsum("ebtf,efd->ebtd", jax.nn.gelu(jnp.einsum("ebtd,edf->ebtf", sent, weights["up"])), weights["down"])
    return x + jnp.einsum("ebsd,bse->bsd", made, gates)


def step_and_arguments(kind: str, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """Return `step(weights, x) -> (weights, loss, gradients)`, and its arguments."""

    def step(weights: Any, x: Any) -> Any:
        documents = (x[..., 0] > 1).astype(jnp.int32).cumsum(1)

        def loss(weights: Any) -> Any:
            y, _ = jax.lax.scan(lambda x, each: (layer(kind, x, each, documents), None), x, weights)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value, gradients

    keys = iter(jax.random.split(jax.random.key(0), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype) * 0.2  # noqa: E731
    if kind in ("attention", "window"):
        shapes = {"q": (EMBED, KV_HEADS * GROUP, HEAD_DIM), "k": (EMBED, KV_HEADS, HEAD_DIM),
                  "v": (EMBED, KV_HEADS, HEAD_DIM), "o": (KV_HEADS, GROUP, HEAD_DIM, EMBED)}  # fmt: skip
    else:
        shapes = {"router": (EMBED, EXPERTS), "up": (EXPERTS, EMBED, HIDDEN), "down": (EXPERTS, HIDDEN, EMBED)}
    return step, {name: draw(LAYERS, *shape) for name, shape in shapes.items()}, draw(BATCH, SEQ, EMBED) * 5
