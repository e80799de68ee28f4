"""`Visibility` and the block tables of splash attention, against the mask that they stand for."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.kernels.block_tables import visits_of_keys, visits_of_queries
from autoshard.kernels.visibility import Visibility

VISIBILITIES = [
    Visibility(),
    Visibility(causal=True),
    Visibility(causal=True, window=1),
    Visibility(causal=True, window=5),
    Visibility(window=3),
    Visibility(causal=True, window=40),
]


def mask(visibility, first, queries, keys):
    return np.asarray(visibility(np.arange(first, first + queries)[:, None], np.arange(keys)[None]))


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=str)
def test_ranges_and_pairs_are_those_of_the_mask(visibility):
    full = mask(visibility, 0, 12, 12)
    assert visibility.pairs(12, 12) == full.sum()
    assert visibility.is_full == full.all()
    for first, last in [(0, 0), (3, 6), (11, 11)]:
        seen = np.flatnonzero(full[first : last + 1].any(0))
        low, high = visibility.keys_of(np.array(first), np.array(last), 12)
        assert (low, high) == (seen[0], seen[-1])
        seeing = np.flatnonzero(full[:, first : last + 1].any(1))
        low, high = visibility.queries_of(first, last)
        assert max(0 if low is None else low, 0) == seeing[0]
        assert min(11 if high is None else high, 11) == seeing[-1]


def visited(tables, rows):
    """Return for each row the blocks of its active visits."""
    visits, active = (np.asarray(x)[0] for x in tables)
    return [sorted(visits[i][active[i] == 1].tolist()) for i in range(rows)]


@pytest.mark.few(10)
@pytest.mark.parametrize("visibility", VISIBILITIES[1:], ids=str)
@pytest.mark.parametrize("block_q, block_k", [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("first, queries", [(0, 16), (0, 8), (8, 8), (12, 4)])
def test_each_block_visits_those_with_a_visible_pair(visibility, block_q, block_k, first, queries):
    """Also for a shard of the queries, which starts in the middle of the sequence."""
    keys, positions = 16, jnp.arange(first, first + queries, dtype=jnp.int32)
    full = mask(visibility, first, queries, keys)
    pairs = full.reshape(queries // block_q, block_q, keys // block_k, block_k)
    blocks = np.asarray(np.logical_or.reduce(pairs, axis=(1, 3)))
    of_queries = visits_of_queries(positions, keys, visibility, block_q, block_k)
    assert visited(of_queries, len(blocks)) == [np.flatnonzero(row).tolist() for row in blocks]
    of_keys = visits_of_keys(positions, keys, visibility, block_q, block_k)
    turned = tuple(np.swapaxes(x, 1, 2) for x in of_keys)
    assert visited(turned, blocks.shape[1]) == [np.flatnonzero(column).tolist() for column in blocks.T]
    for visits, count in ((of_queries.visits, blocks.shape[1]), (of_keys.visits, blocks.shape[0])):
        assert visits.min() >= 0 and visits.max() < count  # skipped visits name a block that there is, too


def test_a_window_narrows_the_tables():
    positions = jnp.arange(1024, dtype=jnp.int32)
    wide = visits_of_queries(positions, 1024, Visibility(causal=True), 32, 32)
    narrow = visits_of_queries(positions, 1024, Visibility(causal=True, window=33), 32, 32)
    assert wide.visits.shape == (1, 32, 32) and narrow.visits.shape == (1, 32, 3)
