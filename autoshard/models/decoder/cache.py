"""Keys and values of earlier positions, kept so that generation does not recompute them.

Each row of a batch has its own length. A layer that sees all earlier positions keeps position p in slot p. A layer
with a window or chunks keeps the last positions only: position p in slot `p % slots`, so a new position replaces the
oldest one. Which position a slot holds follows from the row's length.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.single_rows import by_slices, scattered, with_slots

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


def slots_for(length: int, kind: LayerKind) -> int:
    """Return the number of slots of a layer for rows of `length` positions."""
    return length if kind.reach is None else min(length, kind.reach)


def positions_in(slots: int, lengths: jax.Array) -> jax.Array:
    """Return the position that each slot holds, int32 `[batch, slots]`; negative if it is empty.

    >>> positions_in(4, jnp.array([2, 6])).tolist()
    [[0, 1, -2, -1], [4, 5, 2, 3]]
    """
    slot = lax.broadcasted_iota(jnp.int32, (lengths.shape[0], slots), 1)
    return slot + slots * ((lengths[:, None] - 1 - slot) // slots)


def visible(queries: jax.Array, keys: jax.Array, kind: LayerKind) -> jax.Array:
    """Return which keys each query sees, booleans `[batch, 1, queries, keys]`.

    Args:
        queries: positions `[batch, queries]`.
        keys: positions `[batch, keys]`; no query sees negative ones.
        kind: the kind of the layer, with its window and the size of its chunks.
    """
    q, k = queries[:, None, :, None], keys[:, None, None, :]
    seen = (k >= 0) & (k <= q)
    if kind.window is not None:
        seen = seen & (k > q - kind.window)
    return seen if kind.chunk is None else seen & (k // kind.chunk == q // kind.chunk)


def seen_parts(rows: Rows, seq: int, slots: int, kind: LayerKind) -> tuple[jax.Array, jax.Array]:
    """Return two masks: which kept positions, and which new ones, each of `seq` new positions sees in a layer.

    Returns:
        Booleans `[batch, 1, seq, slots]` and `[batch, 1, seq, seq]`.
    """
    queries = rows.positions(seq)
    real = queries < (rows.lengths + rows.counts)[:, None]
    kept, new = positions_in(slots, rows.lengths), jnp.where(real, queries, -1)
    return visible(queries, kept, kind), visible(queries, new, kind)


def written(kept: jax.Array, new: jax.Array, rows: Rows) -> jax.Array:
    """Write new positions of each row behind its earlier ones.

    Args:
        kept: what the layers have kept, `[layers, batch, slots, ...]`.
        new: what they have computed for the new positions, `[layers, batch, seq, ...]`.
        rows: the rows. Of one new position a row, a slot behind the real ones may hold one that is not real.
    """
    new = new.astype(kept.dtype)
    if new.shape[2] == 1:
        write = with_slots if by_slices(kept) else scattered
        return write(kept, new[:, :, 0], rows.lengths % kept.shape[2])
    # Each slot takes its position from the new ones or, if that is older, keeps what it has.
    from_new = positions_in(kept.shape[2], rows.lengths + rows.counts) - rows.lengths[:, None]
    index = jnp.clip(from_new, 0, new.shape[2] - 1)[None]
    taken = jnp.take_along_axis(new, _aligned(index, new.ndim), axis=2)
    return jnp.where(_aligned(from_new[None] >= 0, new.ndim), taken, kept)


def _aligned(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))
