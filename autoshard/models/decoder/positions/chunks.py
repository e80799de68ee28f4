"""Divides documents into chunks, so that a position attends to its own chunk only (Llama 4)."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp


def chunk_segments(
    chunks: Iterable[int],
    shape: tuple[int, int],
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    context: int,
) -> dict[int, jax.Array]:
    """Return segment ids that number the chunks of all documents, for each size of chunks.

    Args:
        chunks: the sizes.
        shape: `(batch, seq)`.
        positions: the position of each token, `[batch or 1, seq]`, below `context`; None if each row counts from 0.
        segment_ids: the document of each position, `[batch, seq]`, or None.
        context: largest number of positions of a document.

    Returns:
        size -> int32 `[batch, seq]`. A size is left out if each row is known to lie within one chunk.
    """
    counted = jnp.arange(shape[1], dtype=jnp.int32)[None]
    found = {}
    for size in dict.fromkeys(chunks):
        if positions is None and shape[1] <= size:
            continue
        ids = (counted if positions is None else positions).astype(jnp.int32) // size
        if segment_ids is not None:
            ids = ids + segment_ids.astype(jnp.int32) * -(-context // size)
        found[size] = jnp.broadcast_to(ids, shape)
    return found
