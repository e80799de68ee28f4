"""Reads and writes of single rows of an array that a TPU stores with another dimension last.

XLA:TPU pads the dimension that it stores last to whole registers of 128 lanes. If 128 does not divide the last
dimension of a parameter, XLA may store another dimension last: positions in a cache with heads of 64, or tokens in an
embedding of 2880 features. Each gather and scatter of rows then copies the whole array into the usual layout. Slices
are read and updated in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.kernels.constants import LANES
from autoshard.kernels.planned_platform import planned_platform
from autoshard.spmdrules.custom_ops.opaque_primitive import drawing_operands
from autoshard.spmdrules.custom_ops.operator import operator

LARGEST_UNROLLED = 128
"""Most rows on a device that are sliced one by one. Chosen: the time of compilation is linear in it. Compiled for
v5e:2x4, a decode step of gpt-oss-20b with 64 rows moves 1.44 times the bytes of its weights and cache without slices,
and 1.01 times with slices."""


def by_slices(x: jax.Array) -> bool:
    """Return whether rows of an array are better read and updated one by one, on the planned platform."""
    return planned_platform() == "tpu" and x.shape[-1] % LANES != 0


def rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the rows of tokens, `[batch, seq, width]`; NaN for tokens outside of the table.

    Args:
        table: `[vocab, width]`.
        tokens: integers `[batch, seq]`.
    """
    rows = sliced_rows(table, lax.iota(jnp.int32, table.shape[0]), tokens.astype(jnp.int32))
    inside = (tokens >= 0) & (tokens < table.shape[0])
    return jnp.where(inside[..., None], rows, jnp.nan)


def with_slots(kept: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Write one slot of each row of a cache.

    Args:
        kept: `[layers, batch, slots, ...]`.
        new: `[layers, batch, ...]`.
        slots: which slot of each row, int32 `[batch]`.
    """
    return (sliced_slots if kept.ndim == 5 else sliced_latent_slots)(kept, new, slots)


def _draw(rng: np.random.Generator, table: Any, own: Any, tokens: Any) -> dict[int, np.ndarray]:
    """Draw the numbers of all rows, and tokens."""
    numbers = np.arange(own.shape[0], dtype=np.int32)
    return {1: numbers, 2: rng.integers(0, own.shape[0], tokens.shape, np.int32)}


@operator("v e, v, b s -> b s e; reduce v; linear 0")
@drawing_operands(_draw)
def sliced_rows(table: jax.Array, own: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the rows of those tokens whose numbers are in `own`, and zeros for the others."""
    place = tokens - own[0]
    inside = (place >= 0) & (place < own.shape[0])
    place = jnp.clip(place, 0, own.shape[0] - 1).reshape(-1)
    if place.shape[0] <= LARGEST_UNROLLED:
        # Columns of the transpose: XLA slices them in place, in either layout. For rows, it may copy the table.
        columns = [lax.dynamic_slice_in_dim(table.T, at, 1, axis=1) for at in place]
        rows = jnp.concatenate(columns, axis=1).T
    else:
        rows = table.at[place].get(mode="promise_in_bounds")
    return jnp.where(inside[..., None], rows.reshape(*tokens.shape, -1), 0)


@operator("l b s h d, l b h d, b -> l b s h d; whole s; linear 0 1", name="sliced_slots")
def sliced_slots(kept: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Write one slot of each row into a cache of heads."""
    return _sliced(kept, new, slots)


@operator("l b s d, l b d, b -> l b s d; whole s; linear 0 1", name="sliced_slots")
def sliced_latent_slots(kept: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Write one slot of each row into a cache of latent vectors."""
    return _sliced(kept, new, slots)


def _sliced(kept: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    if kept.shape[1] > LARGEST_UNROLLED:
        return scattered(kept, new, slots)
    for row in range(kept.shape[1]):
        update = new[:, row][:, None, None]
        kept = lax.dynamic_update_slice(kept, update, (0, row, slots[row], *(0,) * (kept.ndim - 3)))
    return kept


def scattered(kept: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Write one slot of each row in one scatter, with one update for each layer and row.

    If the usual layout is that of the array, XLA would copy the cache into another one and back for updates of all
    layers at once, or of slices under `vmap`. The arguments are those of `with_slots`.
    """
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(2, new.ndim)),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    indices = jnp.broadcast_to(slots[None, :, None], (*new.shape[:2], 1))
    return lax.scatter(kept, indices, new, numbers, unique_indices=True, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
