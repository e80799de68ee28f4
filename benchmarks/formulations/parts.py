"""What most programs of the corpus share: parameters from shapes, losses, and a step of AdamW."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from formulations.formulation import Program

Shapes = Any  # a tree whose leaves are shapes


def is_shape(x: Any) -> bool:
    """Return whether a leaf is a shape."""
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)


def initialized(key: jax.Array, shapes: Shapes) -> Any:
    """Return float32 parameters: normal with the deviation 1 / sqrt(inputs); vectors are ones."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    keys = jax.random.split(key, len(leaves))
    made = [
        jnp.ones(shape) if len(shape) < 2 else jax.random.normal(k, shape) / math.sqrt(math.prod(shape[-2:-1]))
        for k, shape in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def stacked(shapes: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `layers` equal layers in one stack."""
    return {name: (layers, *shape) for name, shape in shapes.items()}


_COMPUTE: ContextVar[Any] = ContextVar("compute", default=jnp.bfloat16)


@contextlib.contextmanager
def computing_in(dtype: Any) -> Iterator[None]:
    """Build and trace programs that compute in another type than bfloat16: parity needs exact ones."""
    token = _COMPUTE.set(dtype)
    try:
        yield
    finally:
        _COMPUTE.reset(token)


def cast(tree: Any) -> Any:
    """Return the floating leaves in the type of the computation."""
    return jax.tree.map(lambda x: x.astype(_COMPUTE.get()) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def tokens(rows: int, seq: int, vocab: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a function that makes tokens and the tokens that follow them."""

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.randint(key, (rows, seq + 1), 0, vocab, jnp.int32)
        return drawn[:, :-1], drawn[:, 1:]

    return batch


def images(rows: int, side: int, classes: int, channels: int = 3) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a function that makes images `[rows, side, side, channels]` and their labels."""

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, two = jax.random.split(key)
        return jax.random.normal(one, (rows, side, side, channels)), jax.random.randint(two, (rows,), 0, classes)

    return batch


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalize the last dimension by its root mean square."""
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (normal * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Normalize the last dimension by its mean and deviation."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    normal = (wide - mean) * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5) * scale
    return (normal if bias is None else normal + bias).astype(x.dtype)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: str = "SAME") -> jax.Array:
    """Convolve `[batch, height, width, channels]` with a kernel `[height, width, inputs, outputs]`."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=numbers)


def group_norm(x: jax.Array, groups: int) -> jax.Array:
    """Normalize `[batch, height, width, channels]` over the pixels and the channels of each group."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    mean, var = parts.mean((1, 2, 4), keepdims=True), parts.var((1, 2, 4), keepdims=True)
    return ((parts - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape).astype(x.dtype)


def adamw_program(
    loss: Callable[..., jax.Array],
    shapes: Shapes,
    batch: Callable[[jax.Array], tuple[Any, ...]],
    optimizer: optax.GradientTransformation | None = None,
) -> Program:
    """Return a program that trains all parameters with AdamW, or with another optimizer.

    Args:
        loss: `loss(params, *batch)`.
        shapes: those of the parameters.
        batch: makes the batch from a key.
        optimizer: the optimizer; default: AdamW with weight decay.
    """
    chosen = optax.adamw(1e-3, weight_decay=0.1) if optimizer is None else optimizer

    def state(key: jax.Array) -> Any:
        params = initialized(key, shapes)
        return {"params": params, "moments": chosen.init(params)}

    def step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], *batch)
        updates, moments = chosen.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    return Program(step, state, batch)
