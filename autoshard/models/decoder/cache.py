"""Keys and values of earlier positions, kept so that generation does not recompute them.

Each row of a batch has its own length. A layer that sees all earlier positions keeps position p in slot p. A layer
with a window keeps the last positions only: position p in slot `p % slots`, so a new position replaces the oldest one.
Which position a slot holds follows from the row's length.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown

Kept = tuple[jax.Array, ...]


@shown
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderCache:
    """What a `Decoder` keeps of earlier positions.

    Attributes:
        kept: for each segment, for each layer of its pattern, arrays `[repeats, batch, slots, ...]`.
        lengths: number of positions of each row, int32 `[batch]`.
        following: the position of the next token of each row, int32 `[batch]`. It differs from the length behind tokens
            that got positions of their own, such as those of images.
    """

    kept: tuple[tuple[Kept, ...], ...]
    lengths: jax.Array
    following: jax.Array


@shown
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch to which new positions are added.

    Attributes:
        lengths: number of earlier positions of each row, int32 `[batch]`.
        counts: number of new positions of each row that are real, int32 `[batch]`; the rest is padding.
        fresh: whether no row has earlier positions, and the new ones are the whole text.
    """

    lengths: jax.Array
    counts: jax.Array
    fresh: bool = dataclasses.field(metadata={"static": True})

    def positions(self, seq: int) -> jax.Array:
        """Return the positions of `seq` new tokens, int32 `[batch, seq]`."""
        return counted_on(self.lengths, seq)


def counted_on(first: jax.Array, seq: int) -> jax.Array:
    """Return `seq` positions from the first one of each row on, int32 `[batch, seq]`."""
    return first[:, None] + lax.broadcasted_iota(jnp.int32, (first.shape[0], seq), 1)


def slots_for(length: int, window: int | None) -> int:
    """Return the number of slots of a layer for rows of `length` positions."""
    return length if window is None else min(length, window)


def positions_in(slots: int, lengths: jax.Array) -> jax.Array:
    """Return the position that each slot holds, int32 `[batch, slots]`; negative if it is empty.

    >>> positions_in(4, jnp.array([2, 6])).tolist()
    [[0, 1, -2, -1], [4, 5, 2, 3]]
    """
    slot = lax.broadcasted_iota(jnp.int32, (lengths.shape[0], slots), 1)
    return slot + slots * ((lengths[:, None] - 1 - slot) // slots)


def visible(queries: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
    """Return which keys each query sees, booleans `[batch, 1, queries, keys]`.

    Args:
        queries: positions `[batch, queries]`.
        keys: positions `[batch, keys]`; negative ones are seen by none.
        window: number of positions that end at the query's own, or None for all.
    """
    q, k = queries[:, None, :, None], keys[:, None, None, :]
    seen = (k >= 0) & (k <= q)
    return seen if window is None else seen & (k > q - window)


def append(kept: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Write one position of each row, `[batch, 1, ...]`, behind its `lengths` earlier ones."""
    slots = kept.shape[1]

    def row(kept: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(kept, new, slot, axis=0)

    return jax.vmap(row)(kept, new.astype(kept.dtype), lengths % slots)


def extended(kept: jax.Array, new: jax.Array, lengths: jax.Array, counts: jax.Array) -> jax.Array:
    """Write several positions of each row, `[batch, seq, ...]`, of which the first `counts` are real."""
    slots, seq = kept.shape[1], new.shape[1]
    # Each slot takes its position from the new ones or, if that is older, keeps what it has.
    from_new = positions_in(slots, lengths + counts) - lengths[:, None]
    index = jnp.clip(from_new, 0, seq - 1)
    taken = jnp.take_along_axis(new, _aligned(index, new.ndim), axis=1).astype(kept.dtype)
    return jnp.where(_aligned(from_new >= 0, new.ndim), taken, kept)


def _aligned(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))


def with_kept(new: Kept, kept: Kept, rows: Rows, window: int | None) -> tuple[Kept, jax.Array | None, Kept]:
    """Join new keys and values, `[batch, seq, ...]`, with the kept ones.

    Args:
        new: what a layer has computed for the new positions.
        kept: what it has kept.
        rows: the rows.
        window: the layer's window.

    Returns:
        The arrays that the new positions attend to; which of them each position sees, None if the new positions are the
        whole text; and what to keep.
    """
    seq, slots = new[0].shape[1], kept[0].shape[1]
    queries = rows.positions(seq)
    if seq == 1:
        joined = tuple(append(old, x, rows.lengths) for old, x in zip(kept, new, strict=True))
        return joined, visible(queries, positions_in(slots, rows.lengths + 1), window), joined
    after = tuple(extended(old, x, rows.lengths, rows.counts) for old, x in zip(kept, new, strict=True))
    if rows.fresh:
        return new, None, after
    joined = tuple(jnp.concatenate([old, x.astype(old.dtype)], axis=1) for old, x in zip(kept, new, strict=True))
    real = queries < (rows.lengths + rows.counts)[:, None]
    keys = jnp.concatenate([positions_in(slots, rows.lengths), jnp.where(real, queries, -1)], axis=1)
    return joined, visible(queries, keys, window), after
