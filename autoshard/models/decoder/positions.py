"""What layers take from positions besides rotary angles: factors of the queries, and chunks of attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Temperature:
    r"""A factor of the queries that grows with the position, so that attention stays sharp in long texts.

    It is :math:`1 + a \log(1 + \lfloor (p + 1) / n \rfloor)` for the position p (arXiv:2501.19399; Llama 4).

    Attributes:
        scale: a.
        step: n, the number of positions after which the factor changes.

    >>> Temperature(scale=1.0, step=4).factors(jnp.arange(5)).round(2).tolist()
    [1.0, 1.0, 1.0, 1.690000057220459, 1.690000057220459]
    """

    scale: float
    step: int

    def factors(self, positions: jax.Array) -> jax.Array:
        """Return the factor of each position, float32 in the shape of `positions`."""
        return 1.0 + self.scale * jnp.log1p(jnp.floor((positions.astype(jnp.float32) + 1.0) / self.step))


def chunk_segments(
    chunks: Iterable[int],
    shape: tuple[int, int],
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    context: int,
) -> dict[int, jax.Array]:
    """Return the documents of positions when each document is cut into chunks, for each size of chunks.

    Args:
        chunks: the sizes.
        shape: batch and positions of the rows.
        positions: below `context`, `[batch or 1, seq]`; None if they are counted from 0.
        segment_ids: the document of each position, `[batch, seq]`, or None.
        context: largest number of positions of a document.

    Returns:
        size -> int32 `[batch, seq]`. There is no entry if each row is known to be one chunk.
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
