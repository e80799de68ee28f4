"""Queries of layers with a temperature are multiplied by a factor of their position."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.decoder.positions.temperature import Temperature
from tests.models.small import called

SIZES = {"vocab": 16, "width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "context": 32, "init_std": 0.5}


def test_factors():
    factors = Temperature(scale=0.5, step=3).factors(jnp.array([0, 1, 2, 7, 8]))
    assert np.allclose(factors, 1 + 0.5 * np.log([1, 1, 2, 3, 4]))


def test_factors_change_at_whole_multiples_of_the_step():
    """In float32, 61 times the reciprocal of 61 is below 1."""
    positions = jnp.arange(2000)
    found = jax.jit(Temperature(scale=0.5, step=61).factors)(positions)
    assert np.allclose(found, 1 + 0.5 * np.log(1 + (np.arange(2000) + 1) // 61))


def test_queries_get_the_factor_of_the_position_that_is_given():
    kind = LayerKind(rotary=None, temperature=Temperature(2.0, 8))
    model = Decoder(DecoderConfig(kinds=(kind,), **SIZES), rngs=nnx.Rngs(0))
    plain = Decoder(DecoderConfig(kinds=(LayerKind(rotary=None),), **SIZES), rngs=nnx.Rngs(0))
    tokens = jnp.arange(6)[None]

    def late(model, tokens):
        return model(tokens, positions=7 + tokens)  # factors 1 + 2 log(2), then the same

    attention = plain.segments[0][0].layers[0].attention
    attention.wq = nnx.Param(attention.wq[...] * (1 + 2 * np.log(2)))
    assert np.abs(called(model, late, tokens) - called(plain, Decoder.__call__, tokens)).max() < 1e-4
