"""Small programs that the tests of planning share, and the rule by which results are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@partial(jax.jit, static_argnums=(0, 1, 2))
def mlp_state(seed: int = 0, width: int = 64, hidden: int = 128) -> dict[str, jax.Array]:
    """Weights of a two-layer perceptron."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "w": jax.random.normal(keys[0], (width, hidden)) * 0.1,
        "b": jnp.zeros(hidden),
        "v": jax.random.normal(keys[1], (hidden, width)) * 0.1,
    }


def mlp_loss(params: dict[str, jax.Array], x: Any) -> jax.Array:
    """The mean squared difference between the perceptron's output and its input."""
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - x) ** 2)


LOSS_LINE = mlp_loss.__code__.co_firstlineno + 2
"""The line of the computation in `mlp_loss`."""


def sgd_step(params: dict[str, jax.Array], x: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of plain gradient descent."""
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def matrices(*sizes: int) -> list[jax.Array]:
    """Weights of `perceptron`: matrices from each size to the next."""
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    pairs = zip(keys, sizes, sizes[1:], strict=False)
    return [0.3 * jax.random.normal(key, pair) for key, *pair in pairs]


def perceptron(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """A perceptron with any number of layers and without biases."""
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]


def descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent for `loss(params, *data)`. It returns the parameters, the loss and the gradients."""

    def step(params: Any, *data: Any) -> tuple[Any, jax.Array, Any]:
        value, grads = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, grads

    return step


def rows_of(count: int, width: int = 16) -> jax.Array:
    """Random rows, `[count, width]`."""
    return jax.random.normal(jax.random.key(count), (count, width))


OPTIMIZER = optax.adamw(1e-2)


def adamw_step(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], jax.Array]:
    """One step of AdamW over (parameters, optimizer state)."""
    params, moments = state
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def batch(seed: int = 0, size: int = 32, width: int = 64) -> Any:
    """A batch of inputs, `[batch, width]`."""
    return np.random.default_rng(seed).normal(size=(size, width)).astype(np.float32)


def assert_close(expected: Any, actual: Any, tolerance: float = 1e-5) -> None:
    """Compares trees leaf by leaf: the norm of the difference over the norm of the expected leaf.

    A leaf whose norm is below 1e-6 of the whole tree's is compared with the whole tree's.
    """
    expected_leaves = jax.tree_util.tree_flatten_with_path(expected)[0]
    actual_leaves = jax.tree.leaves(actual)
    assert len(expected_leaves) == len(actual_leaves)
    norms = [float(np.linalg.norm(np.asarray(x, np.float64))) for _, x in expected_leaves]
    whole = float(np.linalg.norm(norms))
    for (path, x), y, norm in zip(expected_leaves, actual_leaves, norms, strict=True):
        error = float(np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64)))
        scale = norm if norm > 1e-6 * whole else whole
        assert error <= tolerance * max(scale, 1e-30), f"{jax.tree_util.keystr(path)}: off by {error / scale:.2e}"


def device_bytes(tree: Any) -> int:
    """Bytes of a tree on the device that holds most of it."""
    bytes_of: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            bytes_of[shard.device] = bytes_of.get(shard.device, 0) + shard.data.nbytes
    return max(bytes_of.values())


def whole_bytes(tree: Any) -> int:
    """Bytes of a tree on one device."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
