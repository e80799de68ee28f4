"""Sorting, order statistics, and cumulative sums, products and extremes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32


def sort_pairs(keys: jax.Array, more_keys: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """Sorts by `keys`, then by `more_keys`, and applies the same order to `values`."""
    return tuple(lax.sort((keys, more_keys, values), dimension=1, num_keys=2))


def kth_value(x: jax.Array, k: int, axis: int) -> jax.Array:
    """The k-th smallest element along `axis`, counted from one."""
    return jnp.take(jnp.sort(x, axis), k - 1, axis)


def lex_order(first: jax.Array, second: jax.Array) -> jax.Array:
    """The order of each row's elements by `second`, then by `first`."""
    return jnp.lexsort([first, second], axis=1)


def linear_recurrence(decay: jax.Array, x: jax.Array) -> jax.Array:
    """`h[t] = decay[t] * h[t - 1] + x[t]` along dimension 1 by a parallel scan, as in state-space models."""

    def combine(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], first[1] * second[0] + second[1]

    return lax.associative_scan(combine, (decay, x), axis=1)[1]


_X = f32(4, 8, 12)
_TIES = np.random.default_rng(0).integers(0, 4, (4, 8, 12)).astype(np.int32)
_DUPLICATES = np.array([3, 1, 3, 0, 7, 1, 0, 3, 5, 5, 2, 0], np.int32)
_DECAY = np.random.default_rng(1).uniform(0.2, 1.0, (4, 8, 12)).astype(np.float32)
_POSITIONS = "no gradient: positions"

_SORTED = (
    Operator("sort", partial(jnp.sort, axis=1), (_X,)),
    Operator("sort_descending", partial(jnp.sort, axis=1, descending=True), (_X,)),
    Operator("sort_pairs", sort_pairs, (_TIES, np.flip(_TIES, 2).copy(), _X), (2,), "two keys, the first with ties"),
    Operator("argsort", partial(jnp.argsort, axis=1), (_TIES,), (), _POSITIONS),
    Operator("lexsort", lex_order, (_TIES, np.flip(_TIES, 1).copy()), (), _POSITIONS),
    Operator("partition", partial(jnp.partition, kth=3, axis=1), (_X,)),
    Operator("argpartition", partial(jnp.argpartition, kth=3, axis=1), (_X,), (), _POSITIONS),
    Operator("top_k", partial(lax.top_k, k=3), (_X,)),
    Operator("approx_max_k", partial(lax.approx_max_k, k=3), (_X,)),
    Operator("approx_min_k", partial(lax.approx_min_k, k=3), (_X,)),
    Operator("kth_value", partial(kth_value, k=3, axis=1), (_X,)),
    Operator("median", partial(jnp.median, axis=1), (_X,)),
    Operator("nanmedian", partial(jnp.nanmedian, axis=1), (_X,)),
    Operator("quantile", partial(jnp.quantile, q=0.3, axis=1), (_X,)),
    Operator("percentile", partial(jnp.percentile, q=70.0, axis=1), (_X,)),
    Operator("unique", partial(jnp.unique, size=8, fill_value=-1), (_DUPLICATES,), (), "no gradient: integers"),
)
_CUMULATIVE = (
    *(
        Operator(name, partial(fn, axis=1), (_X,))
        for name, fn in {
            "cumsum": jnp.cumsum,
            "cumsum_reverse": partial(lax.cumsum, reverse=True),
            "cumprod": jnp.cumprod,
            "cummax": lax.cummax,
            "cummin": lax.cummin,
            "nancumsum": jnp.nancumsum,
            "diff": jnp.diff,
        }.items()
    ),
    Operator("cumlogsumexp", partial(lax.cumlogsumexp, axis=1), (_X,)),
    Operator("linear_recurrence", linear_recurrence, (_DECAY, _X), (0, 1)),
)
OPERATORS: tuple[Operator, ...] = (*_SORTED, *_CUMULATIVE)
