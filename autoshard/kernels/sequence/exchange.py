"""Chunks of a sequence, exchanged between devices so that all of them have equal causal work.

A sequence over n devices is 2n chunks. Device i holds chunks 2i and 2i + 1 and needs chunks i and 2n - 1 - i: one early
chunk, which sees few keys, and one late chunk, which sees many. Each device sends its even chunk to one device and its
odd chunk to another one, and receives one of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def holder(chunk: int, devices: int) -> int:
    """Return the device that needs a chunk.

    >>> [holder(chunk, 4) for chunk in range(8)]
    [0, 1, 2, 3, 3, 2, 1, 0]
    """
    return min(chunk, 2 * devices - 1 - chunk)


def exchanged(x: jax.Array, dim: int, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Return the early and the late chunk of this device, from its consecutive shard of an array.

    Args:
        x: the shard; dimension `dim` is the sequence, of an even length.
        dim: the dimension.
        axes: the mesh axes over which the sequence is sharded, major to minor.
    """
    devices, index = lax.axis_size(axes), lax.axis_index(axes)
    chunks = jnp.split(x, 2, axis=dim)
    even, odd = (
        lax.ppermute(chunk, axes, [(i, holder(2 * i + parity, devices)) for i in range(devices)])
        for parity, chunk in enumerate(chunks)
    )
    # The early chunk has number i, so it is even if i is even.
    early_is_even = index % 2 == 0
    return jnp.where(early_is_even, even, odd), jnp.where(early_is_even, odd, even)


def restored(chunks: Sequence[jax.Array], dim: int, axes: Axes) -> jax.Array:
    """Undo `exchanged`: return this device's consecutive shard from its early and its late chunk."""
    devices, index = lax.axis_size(axes), lax.axis_index(axes)
    early, late = chunks
    early_is_even = index % 2 == 0
    held = jnp.where(early_is_even, early, late), jnp.where(early_is_even, late, early)
    back = [
        lax.ppermute(chunk, axes, [(holder(2 * i + parity, devices), i) for i in range(devices)])
        for parity, chunk in enumerate(held)
    ]
    return jnp.concatenate(back, axis=dim)
