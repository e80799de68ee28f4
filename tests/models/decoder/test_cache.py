"""Generation with a cache: each position's logits equal those of a call on the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models.decoder import Decoder, DecoderConfig, ExpertsConfig, LatentConfig, LayerKind, Rotary
from autoshard.models.decoder.cache import Rows, positions_in, written
from autoshard.models.decoder.kinds import LayerInputsConfig
from autoshard.models.decoder.positions.temperature import Temperature
from tests.models.small import quickly

LOCAL, CHUNKED = LayerKind(window=3), LayerKind(chunk=3, unit_norm=True)
WHOLE = LayerKind(head_dim=6, kv_heads=1, keys_as_values=True, rotary=Rotary(fraction=0.5))
BORROWING = dataclasses.replace(WHOLE, keys_as_values=False, borrows="b")
TUNED = Temperature(1.0, 2)
SIZES = {"vocab": 16, "width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 16, "context": 32, "init_std": 0.5}
CONFIGS = {
    "local and global": DecoderConfig(kinds=(LOCAL, LayerKind()) * 2, sinks=True, query_norm=True, **SIZES),
    "separate layers": DecoderConfig(kinds=(LOCAL, LayerKind()) * 2, scan_layers=False, logit_cap=3.0, **SIZES),
    "latent": DecoderConfig(
        kinds=(LayerKind(), LayerKind(experts=True)),
        latent=LatentConfig(6, 4, 2, 5, q_rank=6),
        experts=ExpertsConfig(4, 2, 8, scoring="sigmoid", choice_bias=True, shared_ffn=8),
        **SIZES,
    ),
    "chunks": DecoderConfig(
        kinds=(dataclasses.replace(CHUNKED, experts=True), LayerKind(rotary=None, temperature=TUNED)),
        experts=ExpertsConfig(4, 1, 8, scoring="sigmoid", renormalize=False, gated_input=True),
        **SIZES,
    ),
    "lent": DecoderConfig(
        kinds=(WHOLE, dataclasses.replace(LOCAL, lends="a"), dataclasses.replace(WHOLE, lends="b"))
        + (dataclasses.replace(LOCAL, borrows="a", ffn=24), BORROWING) * 2,
        value_norm=True, layer_scale=True, layer_inputs=LayerInputsConfig(16, 4), **SIZES,
    ),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def model(request):
    return Decoder(CONFIGS[request.param], rngs=nnx.Rngs(0))


def test_positions_in_slots():
    for slots in (1, 3, 8):
        for length in range(9):
            found = positions_in(slots, jnp.array([length]))[0].tolist()
            expected = [max([p for p in range(length) if p % slots == slot], default=None) for slot in range(slots)]
            assert [p if p >= 0 else None for p in found] == expected


@pytest.mark.slow
def test_ragged_prompts_then_single_tokens_then_several(model):
    graph, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 16)
    prompts, steps = jnp.array([7, 2, 5]), 3
    whole = quickly(lambda params: nnx.merge(graph, params)(tokens), params)

    def run(params):
        model = nnx.merge(graph, params)
        found, cache = model.extend(tokens[:, :7], model.cache(3, 16), counts=prompts, fresh=True, last=True)
        logits = [found]
        for _ in range(steps):
            at = jnp.take_along_axis(tokens, cache.lengths[:, None], axis=1)
            found, cache = model.extend(at, cache)
            logits.append(found)
        index = cache.lengths[:, None] + jnp.arange(4)
        found, cache = model.extend(jnp.take_along_axis(tokens, index, axis=1), cache, counts=jnp.array([4, 2, 4]))
        logits.append(found)
        at = jnp.take_along_axis(tokens, cache.lengths[:, None], axis=1)
        return jnp.concatenate(logits, axis=1), model.extend(at, cache)

    logits, (last, cache) = quickly(run, params)
    for row, start in enumerate(prompts.tolist()):
        assert np.abs(logits[row, : steps + 1] - whole[row, start - 1 : start + steps]).max() < 1e-4
        real = 2 if row == 1 else 4
        assert np.abs(logits[row, 4 : 4 + real] - whole[row, start + 3 : start + 3 + real]).max() < 1e-4
        assert np.abs(last[row, 0] - whole[row, start + 3 + real]).max() < 1e-4
    assert cache.lengths.tolist() == [15, 8, 13]


@pytest.mark.parametrize("slots", [3, 8])
def test_one_position_is_written_where_several_would_be(slots):
    """Two positions, of which the second one is not real, take another path."""
    kept = jax.random.normal(jax.random.key(0), (2, 4, slots, 3))
    new = jax.random.normal(jax.random.key(1), (2, 4, 1, 3))
    rows = Rows(jnp.array([0, 2, 3, 7]), jnp.ones(4, jnp.int32), fresh=False)
    two = jnp.concatenate([new, jnp.full_like(new, jnp.nan)], axis=2)
    assert (written(kept, new, rows) == written(kept, two, rows)).all()


def test_a_layer_that_borrows_keeps_nothing():
    kept = Decoder(CONFIGS["lent"], rngs=nnx.Rngs(0)).cache(2, 16).kept
    assert [[len(layer) for layer in segment] for segment in kept] == [[2], [2], [2], [0, 0]]
    assert kept[0][0][0].shape == (1, 2, 16, 1, 6) and kept[1][0][0].shape == (1, 2, 3, 2, 4)


def test_local_layers_keep_their_window_alone():
    model = Decoder(CONFIGS["local and global"], rngs=nnx.Rngs(0))
    ((local, whole),) = model.cache(2, 16).kept
    assert local[0].shape == (2, 2, 3, 2, 4) and whole[0].shape == (2, 2, 16, 2, 4)
    latent = Decoder(dataclasses.replace(CONFIGS["latent"]), rngs=nnx.Rngs(0)).cache(2, 16).kept[0][0]
    assert [x.shape for x in latent] == [(1, 2, 16, 6), (1, 2, 16, 2)]
