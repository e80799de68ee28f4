"""Documents cut into chunks: a position sees those of its own chunk, in packed rows too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models.attention import attention
from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.decoder.positions.chunks import chunk_segments
from tests.models.small import called, filled_as

CONFIG = DecoderConfig(
    vocab=16, width=8, kinds=(LayerKind(chunk=4),) * 2, heads=2, kv_heads=1, head_dim=4, ffn=16, context=32,
    init_std=0.5,
)  # fmt: skip


def test_positions_share_a_document_if_they_share_a_chunk_of_it():
    segments = jnp.array([[3, 3, 3, 3, 3, 7, 7, 7]])
    positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2]])
    (found,) = chunk_segments([2], (1, 8), positions, segments, 32).values()
    same = found[0][:, None] == found[0][None]
    groups = np.array([0, 0, 1, 1, 2, 3, 3, 4])
    assert (same == (groups[:, None] == groups[None])).all()


def test_rows_of_one_chunk_need_no_ids_unless_positions_are_given():
    assert chunk_segments([4], (2, 4), None, None, 32) == {}
    assert chunk_segments([4], (2, 5), None, None, 32)[4].tolist() == [[0, 0, 0, 0, 1]] * 2
    assert chunk_segments([4], (1, 4), jnp.arange(2, 6)[None], None, 32)[4].tolist() == [[0, 0, 1, 1]]


def test_a_layer_attends_within_its_chunk():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 12, 2, 4))
    (ids,) = chunk_segments([4], (2, 12), None, None, 32).values()
    found = attention(q, k, v, causal=True, window=4, segment_ids=ids)
    parts = [attention(*(x[:, n : n + 4] for x in (q, k, v)), causal=True) for n in (0, 4, 8)]
    assert np.abs(found - jnp.concatenate(parts, axis=1)).max() < 1e-5


def test_packed_documents_compute_what_each_computes_alone():
    model = filled_as(lambda rngs: Decoder(CONFIG, rngs=rngs))
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 0, 16)
    segments, positions = jnp.repeat(jnp.arange(2), jnp.array([6, 10]))[None], jnp.r_[0:6, 0:10][None]

    def packed(model, tokens):
        return model(tokens, positions=positions, segment_ids=segments)

    alone = [called(model, Decoder.__call__, part) for part in (tokens[:, :6], tokens[:, 6:])]
    assert np.abs(called(model, packed, tokens) - jnp.concatenate(alone, axis=1)).max() < 1e-4


@pytest.mark.parametrize("position, seen", [(3, True), (4, False)])
def test_later_chunks_do_not_depend_on_earlier_ones(position, seen):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    tokens = jnp.arange(8)[None]
    one, other = (called(model, Decoder.__call__, each)[0, position] for each in (tokens, tokens.at[0, 0].set(9)))
    assert bool((one != other).any()) == seen
