"""Reductions. The sample operators reduce dimension 1 of [4, 8, 12] unless their name says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32


def distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """The Euclidean distance between two arrays, over all dimensions."""
    return jnp.sqrt(jnp.sum(jnp.square(x - y)))


def cosine_similarity(x: jax.Array, y: jax.Array, axis: int = -1) -> jax.Array:
    """The cosine of the angle between two vectors along `axis`."""
    length = jnp.linalg.norm(x, axis=axis) * jnp.linalg.norm(y, axis=axis)
    return jnp.sum(x * y, axis) / jnp.maximum(length, jnp.finfo(x.dtype).tiny)


def standardized_moment(x: jax.Array, order: int, axis: int) -> jax.Array:
    """The mean of `((x - mean) / std) ** order`: the skewness for order 3, the kurtosis for order 4."""
    deviation = x - x.mean(axis, keepdims=True)
    return jnp.mean(deviation**order, axis) / x.std(axis) ** order


def var_mean(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The variance and the mean along `axis`."""
    return x.var(axis), x.mean(axis)


def weighted_average(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The average along dimension 1 with one weight per position."""
    return jnp.average(x, 1, weights)


def order_norm(x: jax.Array, order: float, axis: int) -> jax.Array:
    """The norm of the given order along `axis`."""
    return jnp.linalg.norm(x, order, axis)


_X = f32(4, 8, 12)
_INTS = np.random.default_rng(0).integers(0, 3, (4, 8, 12)).astype(np.int32)
_BOOLS = jax.ShapeDtypeStruct((4, 8, 12), jnp.bool_)
_NOT_SMOOTH = "no gradient: positions or counts"


def _over_axis_1(functions: dict[str, Callable[..., Any]], x: Any, wrt: tuple[int, ...] = (0,), note: str = "") -> Any:
    return tuple(Operator(name, partial(fn, axis=1), (x,), wrt, note) for name, fn in functions.items())


OPERATORS: tuple[Operator, ...] = (
    *_over_axis_1(
        {
            "sum": jnp.sum,
            "mean": jnp.mean,
            "max": jnp.max,
            "min": jnp.min,
            "prod": jnp.prod,
            "var": jnp.var,
            "std": jnp.std,
            "var_mean": var_mean,
            "norm": jnp.linalg.norm,
            "l1_norm": partial(order_norm, order=1),
            "inf_norm": partial(order_norm, order=jnp.inf),
            "p_norm": partial(order_norm, order=3),
            "logsumexp": jax.nn.logsumexp,
            "logmeanexp": jax.nn.logmeanexp,
            "ptp": jnp.ptp,
            "nansum": jnp.nansum,
            "nanmean": jnp.nanmean,
            "nanmax": jnp.nanmax,
            "nanmin": jnp.nanmin,
            "nanvar": jnp.nanvar,
            "trapezoid": jnp.trapezoid,
            "skew": partial(standardized_moment, order=3),
            "kurtosis": partial(standardized_moment, order=4),
        },
        _X,
    ),
    Operator("sum_all", jnp.sum, (_X,)),
    Operator("mean_all", jnp.mean, (_X,)),
    Operator("frobenius_norm", partial(jnp.linalg.norm, axis=(1, 2)), (_X,)),
    Operator("average", weighted_average, (_X, np.linspace(0.5, 2.0, 8, dtype=np.float32)), (0, 1)),
    Operator("distance", distance, (_X, f32(4, 8, 12)), (0, 1)),
    Operator("cosine_similarity", partial(cosine_similarity, axis=1), (_X, f32(4, 8, 12)), (0, 1)),
    *_over_axis_1({"argmax": jnp.argmax, "argmin": jnp.argmin}, _X, (), _NOT_SMOOTH),
    Operator("count_nonzero", partial(jnp.count_nonzero, axis=1), (_INTS,), (), _NOT_SMOOTH),
    *_over_axis_1({"any": jnp.any, "all": jnp.all}, _BOOLS, (), "no gradient: booleans"),
    *(
        Operator(name, partial(fn, axes=(1,)), (_INTS,), (), "no gradient: integers")
        for name, fn in {"reduce_and": lax.reduce_and, "reduce_or": lax.reduce_or, "reduce_xor": lax.reduce_xor}.items()
    ),
)
