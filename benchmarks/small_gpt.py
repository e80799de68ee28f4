"""A GPT's train step, written for one device. The module does not change `sys.path`, so every checkout can use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from autoshard.models import GPT, GPTConfig, cross_entropy


def gpt_step(
    config: GPTConfig, batch: int, forward: Callable[[GPT, jax.Array], jax.Array] = GPT.__call__
) -> tuple[Callable[..., Any], Callable[..., Any], Any, Any]:
    """A train step (AdamW, clipping) of a GPT, written for one device.

    Args:
        config: the model.
        batch: sequences in a batch.
        forward: the model's forward pass; a place for constraints by hand.

    Returns:
        The step `(state, tokens) -> (state, loss)`, the function that creates the state from a key, and the shapes
        of the state and of the tokens `[batch, context + 1]`.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))

    def create(key: jax.Array) -> dict[str, Any]:
        params = nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(key))))
        return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        total, count = cross_entropy(forward(nnx.merge(graph, params), tokens[:, :-1]), tokens[:, 1:])
        return total / count

    def train_step(state: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    shapes = jax.eval_shape(create, jax.random.key(0))
    return train_step, create, shapes, jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)
