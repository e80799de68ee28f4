"""Training steps with named values: layers in a scan or unrolled, with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

LAYERS, ROWS, EMBED, FFN = 3, 64, 32, 64
POLICY = jax.checkpoint_policies.save_only_these_names("hidden")
OPTIMIZER = optax.adamw(1e-2)


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    hidden = checkpoint_name(jnp.tanh(x @ w["up"] + w["bias"]), "hidden")
    return checkpoint_name(x + hidden @ w["down"], "out"), None


def parameters(layers: int = LAYERS) -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (layers, EMBED, FFN)) / 6,
        "bias": jnp.zeros((layers, FFN)),
        "down": jax.random.normal(down, (layers, FFN, EMBED)) / 8,
    }


def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (ROWS, EMBED))


def loss_of(kind: str) -> Callable[[Any, jax.Array], jax.Array]:
    """The loss of layers that are scanned, from the last one on if `reverse` is in `kind`, or unrolled (`unrolled`).

    They are recomputed if `remat` or `policy` is in `kind`.
    """
    body = layer
    if "remat" in kind:
        body = jax.checkpoint(layer)
    if "policy" in kind:
        body = jax.checkpoint(layer, policy=POLICY)
    if "jit" in kind:
        body = jax.jit(layer)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if "unrolled" in kind:
            for n in range(LAYERS):
                x, _ = body(x, jax.tree.map(lambda w, n=n: w[n], params))
        else:
            x, _ = jax.lax.scan(body, x, params, reverse="reverse" in kind)
        return jnp.mean(x**2)

    return loss


def step_of(kind: str) -> Callable[..., Any]:
    """A step `(params, moments, rows) -> (params, moments, loss, gradients)`; `micro` in `kind`: two microbatches.

    `frozen` in `kind`: only `up` is trained.
    """
    loss = loss_of(kind)

    def gradients(params: Any, x: jax.Array) -> Any:
        if "frozen" in kind:
            rest = {k: w for k, w in params.items() if k != "up"}
            value, up = jax.value_and_grad(lambda up: loss({**rest, "up": up}, x))(params["up"])
            return value, {"up": up} | jax.tree.map(jnp.zeros_like, rest)
        return jax.value_and_grad(loss)(params, x)

    def step(params: Any, moments: Any, x: jax.Array) -> Any:
        if "micro" in kind:

            def add(total: Any, x: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradients(params, x)), None

            zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            (value, grads), _ = jax.lax.scan(add, zero, x.reshape(2, ROWS // 2, EMBED))
        else:
            value, grads = gradients(params, x)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value, grads

    return step


def arguments(layers: int = LAYERS) -> tuple[Any, Any, jax.Array]:
    params = parameters(layers)
    return params, OPTIMIZER.init(params), rows()
