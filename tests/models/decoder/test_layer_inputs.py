"""Vectors of each token for each layer: each layer gets its own, in scanned and in separate layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.decoder.kinds import LayerInputsConfig
from autoshard.models.decoder.layer_inputs import LayerInputs
from tests.models.small import quickly

LOCAL = LayerKind(window=3)
CONFIG = DecoderConfig(
    vocab=16, width=8, kinds=(LOCAL, LayerKind()) * 2 + (LOCAL,), heads=2, kv_heads=1, head_dim=4, ffn=16, context=32,
    layer_inputs=LayerInputsConfig(12, 4), init_std=0.5,
)  # fmt: skip


def test_vectors_are_those_of_the_formula():
    made = LayerInputs(CONFIG, jax.random.key(0))
    x, tokens = jax.random.normal(jax.random.key(1), (1, 3, 8)), jnp.array([[4, 0, 12]])
    context = np.einsum("bse,elw->lbsw", x, made.projection[...]) / np.sqrt(8)
    context /= np.sqrt(np.mean(context**2, axis=-1, keepdims=True) + CONFIG.norm_eps)
    own = np.moveaxis(np.asarray(made.embed[...])[np.array([[4, 0, 0]])], 2, 0) * 2
    found = made(tokens, x)
    assert np.abs(found - (context + own) / np.sqrt(2))[:, :, :2].max() < 1e-5
    assert np.isnan(found[:, :, 2]).all()  # a token outside of the vocabulary of the vectors


@pytest.mark.few(1)
@pytest.mark.parametrize("scan", [True, False])
def test_a_layer_takes_its_own_vectors(scan):
    model = Decoder(dataclasses.replace(CONFIG, scan_layers=scan), rngs=nnx.Rngs(0))
    gate = (model.segments[0] if scan else model.segments[0][0]).layers[1].gate.w_gate
    gate[...] = gate[...].at[0].set(0) if scan else jnp.zeros_like(gate[...])  # of layer 1 alone
    graph, params = nnx.split(model)

    def size(params):
        return jnp.sum(jnp.abs(nnx.merge(graph, params).features(jnp.arange(6)[None])))

    found = quickly(jax.grad(size), params)["layer_inputs"]["embed"][...]
    assert np.abs(found).sum((0, 2)).astype(bool).tolist() == [True, False, True, True, True]
