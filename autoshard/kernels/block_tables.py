"""Which blocks of keys a block of queries has to visit, as the tables that splash attention reads.

The tables are computed from the positions of the queries that a shard holds, so a kernel runs unchanged on a shard of
the sequence. Blocks without a visible pair are skipped. A window bounds the number of blocks that can be visited. The
tables, and with them the kernel's grid, have no more columns than that.

    visits[0, i, j]  the block of keys that the j-th visit of the i-th block of queries reads
    active[0, i, j]  1 if the visit has a visible pair, 0 if it is skipped

A skipped visit names a block that is read next or was read last, so that skipping loads nothing in vain.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.kernels.visibility import Visibility


@shown
class BlockTables(NamedTuple):
    """The tables of one kernel: `visits` and `active`, both `[1, rows, columns]`."""

    visits: jax.Array
    active: jax.Array


def visits_of_queries(
    positions: jax.Array, keys: int, visibility: Visibility, block_q: int, block_k: int
) -> BlockTables:
    """Return the blocks of keys that each block of queries visits.

    Args:
        positions: positions of the queries, `[queries]`, consecutive.
        keys: number of keys; their positions are counted from 0.
        visibility: which keys a query sees.
        block_q: queries in a block.
        block_k: keys in a block.
    """
    blocks = positions.reshape(-1, block_q)
    low, high = visibility.keys_of(blocks[:, 0], blocks[:, -1], keys, jnp)
    count = keys // block_k
    return _tables(low // block_k, high // block_k, _width(count, visibility, block_k, block_q), count)


def visits_of_keys(positions: jax.Array, keys: int, visibility: Visibility, block_q: int, block_k: int) -> BlockTables:
    """Return the blocks of queries that each block of keys visits, `[1, visits, blocks of keys]`.

    The arguments are those of `visits_of_queries`.
    """
    count = positions.shape[0] // block_q
    first = jnp.arange(keys // block_k, dtype=jnp.int32) * block_k
    low, high = visibility.queries_of(first, first + (block_k - 1))
    # Positions become indices among the queries, which start anywhere in the sequence.
    begin = 0 * first if low is None else (low - positions[0]).clip(0, count * block_q)
    end = 0 * first + (count * block_q - 1) if high is None else (high - positions[0]).clip(-1, count * block_q - 1)
    tables = _tables(begin // block_q, end // block_q, _width(count, visibility, block_q, block_k), count)
    return BlockTables(*(jnp.swapaxes(x, 1, 2) for x in tables))


def _width(blocks: int, visibility: Visibility, block: int, other: int) -> int:
    """Return the largest number of blocks that one block of the other kind can visit."""
    if visibility.window is None:
        return blocks
    behind = visibility.window - 1
    span = other + behind * (1 if visibility.causal else 2)  # positions that a block of the other kind can reach
    return min(blocks, -(-(span - 1) // block) + 1)


def _tables(first: jax.Array, last: jax.Array, width: int, count: int) -> BlockTables:
    """Return the tables for rows that visit the blocks `first` to `last` of `count`, in `width` visits."""
    step = jnp.arange(width, dtype=jnp.int32)
    block = first[:, None] + step
    active = block <= last[:, None]
    following = jnp.concatenate([first[1:], last[-1:]])  # what the next row reads first
    visits = jnp.where(active, block, following[:, None]).clip(0, count - 1)
    return BlockTables(visits[None].astype(jnp.int32), active[None].astype(jnp.int32))
