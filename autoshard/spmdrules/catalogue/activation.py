"""Activations: elementwise ones, and those that combine channels (GLU, maxout, CReLU)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from autoshard.spmdrules.catalogue.entry import Operator, f32


def mish(x: jax.Array) -> jax.Array:
    """`x * tanh(softplus(x))` (Misra, 2019)."""
    return x * jnp.tanh(jax.nn.softplus(x))


def tanhshrink(x: jax.Array) -> jax.Array:
    """`x - tanh(x)`."""
    return x - jnp.tanh(x)


def softshrink(x: jax.Array, width: float = 0.5) -> jax.Array:
    """`sign(x) * max(|x| - width, 0)`."""
    return jnp.sign(x) * jax.nn.relu(jnp.abs(x) - width)


def hardshrink(x: jax.Array, width: float = 0.5) -> jax.Array:
    """`x` where `|x|` is above `width`, zero elsewhere."""
    return jnp.where(jnp.abs(x) > width, x, jnp.zeros_like(x))


def threshold(x: jax.Array, lower: float = 0.1, fill: float = -1.0) -> jax.Array:
    """`x` where it is above `lower`, a constant elsewhere."""
    return jnp.where(x > lower, x, jnp.full_like(x, fill))


def prelu(x: jax.Array, slope: jax.Array) -> jax.Array:
    """`x` where it is positive, else `x` times the learned slope of its channel (He et al., 2015)."""
    return jnp.where(x > 0, x, x * slope)


def scaled_tanh(x: jax.Array, inner: float = 0.67, outer: float = 1.7159) -> jax.Array:
    """`outer * tanh(inner * x)`."""
    return outer * jnp.tanh(inner * x)


def quick_gelu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(1.702 * x)`."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: jax.Array) -> jax.Array:
    """`relu(x) ** 2` (So et al., 2021)."""
    return jnp.square(jax.nn.relu(x))


def log_cosh(x: jax.Array) -> jax.Array:
    """`log(cosh(x))`, computed without overflow."""
    return jnp.logaddexp(x, -x) - jnp.log(2.0).astype(x.dtype)


def gaussian(x: jax.Array) -> jax.Array:
    """`exp(-x ** 2)`."""
    return jnp.exp(-jnp.square(x))


def maxout(x: jax.Array, pieces: int = 2) -> jax.Array:
    """The maximum of each group of `pieces` adjacent channels (Goodfellow et al., 2013)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // pieces, pieces).max(-1)


def crelu(x: jax.Array) -> jax.Array:
    """The positive and the negative part concatenated, twice as many channels (Shang et al., 2016)."""
    return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], -1)


_UNARY = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "celu": partial(jax.nn.celu, alpha=1.5),
    "selu": jax.nn.selu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "quick_gelu": quick_gelu,
    "silu": jax.nn.silu,
    "mish": mish,
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "tanh": jnp.tanh,
    "scaled_tanh": scaled_tanh,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "squareplus": jax.nn.squareplus,
    "sparse_plus": jax.nn.sparse_plus,
    "sparse_sigmoid": jax.nn.sparse_sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_silu": jax.nn.hard_silu,
    "hard_tanh": jax.nn.hard_tanh,
    "tanhshrink": tanhshrink,
    "softshrink": softshrink,
    "hardshrink": hardshrink,
    "threshold": threshold,
    "squared_relu": squared_relu,
    "log_cosh": log_cosh,
    "gaussian": gaussian,
    "identity": jax.nn.identity,
}
OPERATORS: tuple[Operator, ...] = (
    *(Operator(name, fn, (f32(4, 8),)) for name, fn in _UNARY.items()),
    Operator("prelu", prelu, (f32(4, 8, 12), f32(12)), (0, 1), "one slope per channel"),
    Operator("glu", jax.nn.glu, (f32(4, 8, 48),), note="the channels are halved"),
    Operator("maxout", maxout, (f32(4, 8, 32),)),
    Operator("crelu", crelu, (f32(4, 8),)),
)
