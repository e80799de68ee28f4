"""Random numbers, and operators that draw them.

Each is a pure function of a key. JAX's generator numbers the elements of the whole array, so that an element has the
same bits for every sharding. A mask is therefore the same in the forward and backward pass, with and without remat, and
on every mesh, and drawing it moves no data. Draws that belong to an array have that array's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32


def dropout(key: jax.Array, x: jax.Array, *, rate: float = 0.25) -> jax.Array:
    """Sets each element to 0 with probability `rate`, else divides it by `1 - rate` (Srivastava et al. 2014)."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def dropout_add(key: jax.Array, x: jax.Array, residual: jax.Array, *, rate: float = 0.25) -> jax.Array:
    """`residual + dropout(x)`, added in float32 and rounded once to the residual's dtype.

    Args:
        key: a PRNG key. The same key gives the same mask.
        x: an array of any shape and floating-point dtype.
        residual: an array of the shape of x.
        rate: the probability that an element of x is dropped.
    """
    kept = dropout(key, x.astype(jnp.float32), rate=rate)
    return (residual.astype(jnp.float32) + kept).astype(residual.dtype)


def spatial_dropout(key: jax.Array, x: jax.Array, *, rate: float = 0.25) -> jax.Array:
    """Dropout of whole channels of an example `[batch, ..., channels]` (arXiv:1411.4280)."""
    keep = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1]))
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def drop_path(key: jax.Array, x: jax.Array, *, rate: float = 0.25) -> jax.Array:
    """Dropout of whole examples `[batch, ...]` of a residual branch: stochastic depth (arXiv:1603.09382)."""
    keep = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def alpha_dropout(key: jax.Array, x: jax.Array, *, rate: float = 0.25) -> jax.Array:
    """Sets elements to SELU's limit, then scales and shifts to keep mean 0 and variance 1 (arXiv:1706.02515)."""
    low = -1.7580993408473766  # -lambda * alpha of SELU, its limit for large negative inputs
    scale = (1.0 - rate + low**2 * rate * (1.0 - rate)) ** -0.5
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return scale * jnp.where(keep, x, jnp.full_like(x, low)) - scale * low * rate


def token_dropout(key: jax.Array, tokens: jax.Array, *, rate: float = 0.25, mask_id: int = 0) -> jax.Array:
    """Replaces each integer by `mask_id` with probability `rate`, as in masked language modelling."""
    masked = jax.random.bernoulli(key, rate, tokens.shape)
    return jnp.where(masked, jnp.full_like(tokens, mask_id), tokens)


def gaussian_noise(key: jax.Array, x: jax.Array, *, deviation: float = 0.1) -> jax.Array:
    """Adds normal noise to x."""
    return x + deviation * jax.random.normal(key, x.shape, x.dtype)


def diffusion_noise(key: jax.Array, x: jax.Array, signal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`sqrt(a) x + sqrt(1 - a) noise` with a signal level a `[batch]` in (0, 1), and the noise (arXiv:2006.11239)."""
    noise = jax.random.normal(key, x.shape, x.dtype)
    level = signal.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.sqrt(level) * x + jnp.sqrt(1.0 - level) * noise, noise


def reparametrized_normal(key: jax.Array, mean: jax.Array, log_variance: jax.Array) -> jax.Array:
    """A sample `mean + exp(log_variance / 2) * noise`, differentiable in both parameters (arXiv:1312.6114)."""
    return mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape, mean.dtype)


def gumbel_softmax(key: jax.Array, logits: jax.Array, *, temperature: float = 0.5) -> jax.Array:
    """`softmax((logits + gumbel) / temperature)`: a differentiable, nearly one-hot sample (arXiv:1611.01144)."""
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    return jax.nn.softmax((logits + noise) / temperature, -1)


def sample_top_k(key: jax.Array, logits: jax.Array, *, k: int = 4) -> jax.Array:
    """Samples a class for each row `[..., classes]` among its k most probable classes."""
    values, classes = lax.top_k(logits, k)
    chosen = jax.random.categorical(key, values)
    return jnp.sum(jnp.where(_positions(classes) == chosen[..., None], classes, 0), -1)


def sample_top_p(key: jax.Array, logits: jax.Array, *, p: float = 0.9) -> jax.Array:
    """Samples a class for each row `[..., classes]` among the fewest with total probability p (arXiv:1904.09751)."""
    descending = -jnp.sort(-jax.nn.softmax(logits, -1), -1)
    preceding = jnp.cumsum(descending, -1) - descending
    threshold = jnp.min(jnp.where(preceding < p, descending, jnp.inf), -1, keepdims=True)
    allowed = jax.nn.softmax(logits, -1) >= threshold
    return jax.random.categorical(key, jnp.where(allowed, logits, -jnp.inf))


def _positions(x: jax.Array) -> jax.Array:
    """The position of each element in the last dimension."""
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def mixup(key: jax.Array, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mixes examples and one-hot labels with the reversed batch, by one uniform weight each (arXiv:1710.09412).

    Args:
        key: a PRNG key.
        x: `[batch, ...]`.
        labels: `[batch, classes]`.
    """
    weight = jax.random.uniform(key, x.shape[:1])

    def mixed(a: jax.Array) -> jax.Array:
        w = weight.reshape(-1, *(1,) * (a.ndim - 1))
        return w * a + (1.0 - w) * jnp.flip(a, 0)

    return mixed(x), mixed(labels)


def stochastic_rounding(key: jax.Array, x: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, up or down with the probability that makes the mean exact (arXiv:1502.02551)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    low = jax.random.bits(key, x.shape, jnp.uint32) & jnp.uint32(0xFFFF)
    rounded = lax.bitcast_convert_type((bits + low) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def random_mask(key: jax.Array, x: jax.Array, *, kept: int = 4) -> tuple[jax.Array, jax.Array]:
    """Returns `kept` random positions of each example `[batch, seq, embed]` and their indices (arXiv:2111.06377)."""
    order = jnp.argsort(jax.random.uniform(key, x.shape[:2]), 1)[:, :kept]
    return jax.vmap(lambda rows, at: rows[at])(x, order), order


def random_flip(key: jax.Array, x: jax.Array) -> jax.Array:
    """Mirrors each example `[batch, height, width, channels]` along its width with probability one half."""
    flipped = jax.random.bernoulli(key, 0.5, (x.shape[0], 1, 1, 1))
    return jnp.where(flipped, jnp.flip(x, 2), x)


def shuffle(key: jax.Array, x: jax.Array) -> jax.Array:
    """Shuffles the rows. Any row may move to any shard, so a sharded dimension is communicated whole."""
    return jax.random.permutation(key, x)


def _draw(name: str, fn: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> Operator:
    """An operator that draws an array `[8, 12]`: `fn(key, *args, shape=(8, 12), **kwargs)`."""
    return Operator(name, partial(fn, shape=(8, 12), **kwargs), (_KEY, *args), (), _OF_A_KEY)


_KEY: Any = jax.eval_shape(lambda: jax.random.key(0))
_X, _TOKENS = f32(8, 12, 16), (np.arange(96, dtype=np.int32) * 7 % 20).reshape(8, 12)
_SIGNAL = (np.arange(8, dtype=np.float32) + 1.0) / 9.0
_POSITIVE = (1.0 + np.arange(12, dtype=np.float32) % 5).reshape(1, 12)
_OF_A_KEY = "no gradient: a function of a key"

OPERATORS: tuple[Operator, ...] = (
    Operator("dropout", dropout, (_KEY, _X), (1,)),
    Operator(
        "dropout_add", dropout_add,
        (_KEY, *(jax.ShapeDtypeStruct((8, 12, 16), jnp.bfloat16),) * 2), (1, 2), "added in float32, rounded once",
    ),
    Operator("spatial_dropout", spatial_dropout, (_KEY, f32(8, 12, 20, 16)), (1,)),
    Operator("drop_path", drop_path, (_KEY, _X), (1,)),
    Operator("alpha_dropout", alpha_dropout, (_KEY, _X), (1,)),
    Operator("token_dropout", token_dropout, (_KEY, _TOKENS), (), "no gradient: integers"),
    Operator("gaussian_noise", gaussian_noise, (_KEY, _X), (1,)),
    Operator("diffusion_noise", diffusion_noise, (_KEY, _X, _SIGNAL), (1, 2)),
    Operator("reparametrized_normal", reparametrized_normal, (_KEY, _X, _X), (1, 2)),
    Operator("gumbel_softmax", gumbel_softmax, (_KEY, _X), (1,)),
    Operator("mixup", mixup, (_KEY, _X, f32(8, 20)), (1, 2)),
    Operator("random_mask", random_mask, (_KEY, _X), (1,)),
    Operator("random_flip", random_flip, (_KEY, f32(8, 12, 20, 16)), (1,)),
    Operator("shuffle", shuffle, (_KEY, _X), (1,)),
    Operator("stochastic_rounding", stochastic_rounding, (_KEY, _X), (), "no gradient: works on bits"),
    Operator("sample_categorical", jax.random.categorical, (_KEY, f32(8, 12)), (), "no gradient: integers"),
    Operator("sample_top_k", sample_top_k, (_KEY, f32(8, 12)), (), "no gradient: integers"),
    Operator("sample_top_p", sample_top_p, (_KEY, f32(8, 12)), (), "no gradient: integers"),
    _draw("random_bits", jax.random.bits),
    _draw("uniform", jax.random.uniform),
    _draw("normal", jax.random.normal),
    _draw("truncated_normal", jax.random.truncated_normal, np.float32(-2), np.float32(2)),
    _draw("bernoulli", jax.random.bernoulli, np.float32(0.3)),
    _draw("randint", jax.random.randint, minval=0, maxval=20),
    _draw("rademacher", jax.random.rademacher),
    _draw("gumbel", jax.random.gumbel),
    _draw("exponential", jax.random.exponential),
    _draw("laplace", jax.random.laplace),
    _draw("logistic", jax.random.logistic),
    _draw("cauchy", jax.random.cauchy),
    _draw("rayleigh", jax.random.rayleigh, np.float32(2)),
    _draw("gamma", jax.random.gamma, _POSITIVE),
    _draw("beta", jax.random.beta, _POSITIVE, _POSITIVE),
    _draw("poisson", jax.random.poisson, _POSITIVE),
    Operator("dirichlet", jax.random.dirichlet, (_KEY, _POSITIVE[0] + 1.0), (), _OF_A_KEY),
    Operator("permutation", partial(jax.random.permutation, x=12), (_KEY,), (), _OF_A_KEY),
    Operator("choice", partial(jax.random.choice, a=20, shape=(12,), replace=False), (_KEY,), (), _OF_A_KEY),
    Operator("split_key", partial(jax.random.split, num=8), (_KEY,), (), "no gradient: keys"),
    Operator("fold_in", jax.random.fold_in, (_KEY, np.uint32(3)), (), "no gradient: a key"),
)  # fmt: skip
