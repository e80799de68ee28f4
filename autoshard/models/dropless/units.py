"""The hidden units of an expert, computed from the products of its input with its first matrices.

All of them are zero if the products are zero.

Sources: the gated unit, Shazeer (arXiv:2002.05202); the limited unit, gpt-oss (arXiv:2508.10925).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Unit = Callable[[Sequence[jax.Array]], jax.Array]


def gelu(products: Sequence[jax.Array]) -> jax.Array:
    """Return `gelu(up)` of the product `up`."""
    return jax.nn.gelu(products[0])


def swiglu(products: Sequence[jax.Array]) -> jax.Array:
    """Return `silu(gate) * up` of the products `gate` and `up`."""
    return jax.nn.silu(products[0]) * products[1]


def limited(products: Sequence[jax.Array], *, limit: float, alpha: float) -> jax.Array:
    """Return `(clip(up, -limit, limit) + 1) * g * sigmoid(alpha g)` with `g = min(gate, limit)`."""
    gate, up = jnp.minimum(products[0], limit), jnp.clip(products[1], -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
