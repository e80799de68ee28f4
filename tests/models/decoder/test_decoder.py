"""The decoder: its variants agree, its experts are chosen as described, and wrong configs are named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models.decoder import Decoder, DecoderConfig, ExpertsConfig, LayerKind, Rotary
from autoshard.models.decoder.experts import route
from autoshard.models.decoder.kinds import LayerInputsConfig
from autoshard.models.decoder.positions.temperature import Temperature
from tests.models.small import called, quickly

LOCAL = LayerKind(window=3)
TINY = DecoderConfig(
    vocab=16, width=8, kinds=(LOCAL, LayerKind()) * 2 + (LOCAL,), heads=2, kv_heads=1, head_dim=4, ffn=16, context=32
)


def loss_and_gradients(cfg):
    """Returns the loss of a model, and its gradient for the embedding."""
    graph, params = nnx.split(Decoder(cfg, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, cfg.vocab)

    def loss(params):
        total, count = nnx.merge(graph, params).loss({"inputs": tokens, "targets": tokens[:, ::-1]})
        return total / count

    value, gradients = quickly(jax.value_and_grad(loss), params)
    return float(value), [np.asarray(x) for x in jax.tree.leaves(gradients["embed"])][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg, changes",
    [
        (TINY, {"scan_layers": False, "remat": "full"}),
        (TINY, {"loss_chunks": 4}),
        (dataclasses.replace(TINY, logit_cap=0.1, init_std=0.5), {"loss_chunks": 4}),
    ],
    ids=["separate, rematerialized layers", "loss in chunks", "capped loss in chunks"],
)
def test_variants_agree(cfg, changes):
    expected = loss_and_gradients(cfg)
    found = loss_and_gradients(dataclasses.replace(cfg, **changes))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert np.abs(found[1] - expected[1]).max() < 1e-6


def test_a_token_outside_the_vocabulary_gives_nan():
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    logits = called(model, Decoder.__call__, jnp.array([[16], [-1], [15]]))
    assert np.isnan(logits).any(axis=(1, 2)).tolist() == [True, True, False]


@pytest.mark.parametrize("tokens", [jnp.zeros((2, 33), jnp.int32), jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)])
def test_tokens_that_do_not_fit(tokens):
    with pytest.raises(ValueError, match="Decoder: tokens"):
        Decoder(TINY, rngs=nnx.Rngs(0))(tokens)


def test_softmax_gates_of_chosen_experts_sum_to_one():
    logits = jnp.array([[0.0, 3.0, 1.0, 2.0]])
    gates, chosen = route(ExpertsConfig(4, 2, 8), logits)
    assert chosen.tolist() == [[1, 3]]
    assert gates[0].tolist() == pytest.approx((jax.nn.softmax(jnp.array([3.0, 2.0]))).tolist(), rel=1e-6)
    plain, _ = route(ExpertsConfig(4, 2, 8, renormalize=False, scale=2.0), logits)
    assert plain[0].tolist() == pytest.approx((2 * jax.nn.softmax(logits[0])[jnp.array([1, 3])]).tolist(), rel=1e-6)


def test_the_choice_is_limited_to_the_best_groups():
    cfg = ExpertsConfig(6, 2, 8, scoring="sigmoid", groups=3, top_groups=1, group_best=2, renormalize=False)
    logits = jnp.array([[3.0, -9.0, 2.0, 1.9, 0.0, 0.0]])  # the best expert is in a group whose two best sum to less
    gates, chosen = route(cfg, logits)
    assert chosen.tolist() == [[2, 3]]
    assert gates[0].tolist() == pytest.approx((jax.nn.sigmoid(jnp.array([2.0, 1.9]))).tolist(), rel=1e-6)


def test_the_bias_of_the_choice_does_not_change_the_gate():
    cfg = ExpertsConfig(3, 1, 8, scoring="sigmoid", renormalize=False, choice_bias=True)
    gates, chosen = route(cfg, jnp.array([[1.0, 0.0, -1.0]]), jnp.array([0.0, 0.0, 5.0]))
    assert chosen.tolist() == [[2]] and gates[0].tolist() == pytest.approx(jax.nn.sigmoid(jnp.array([-1.0])).tolist())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kinds": ()}, "kinds is empty"),
        ({"kv_heads": 3}, "heads 2 is not a multiple of kv_heads 3"),
        ({"head_dim": 3}, "3 elements of a head are rotated, but rotation needs pairs"),
        ({"kinds": (LayerKind(experts=True),)}, "layers have experts, but experts is None"),
        ({"kinds": (LayerKind(window=0),)}, "a layer's window is 0"),
        ({"kinds": (LayerKind(rotary=Rotary(scaling="yarn")),)}, "original_context is 0; yarn needs at least 1"),
        ({"experts": ExpertsConfig(4, 5, 8)}, "top_k is 5; it must be at most the number of experts, 4"),
        ({"experts": ExpertsConfig(6, 4, 8, groups=3, top_groups=1)}, "top_k is 4, but 1 of 3 groups have fewer"),
        ({"experts": ExpertsConfig(6, 1, 8, groups=4)}, "groups is 4; it must divide the 6 experts"),
        ({"activation": "relu", "dtype": "int8"}, "activation is 'relu'.*dtype is 'int8'"),
        ({"remat": "some"}, "remat is 'some'"),
        ({"kinds": (LayerKind(chunk=0),)}, "a layer's chunk is 0"),
        ({"kinds": (LayerKind(chunk=4, scope="region"),)}, "chunk 4 and scope 'region'; chunks cut documents only"),
        ({"kinds": (LayerKind(temperature=Temperature(0.1, 0)),)}, "the step of a layer's temperature is 0"),
        ({"kinds": (LayerKind(kv_heads=3),)}, "heads 2 is not a multiple of kv_heads 3"),
        ({"kinds": (LayerKind(rotary=Rotary(fraction=0.0)),)}, "the rotary fraction is 0"),
        ({"kinds": (LayerKind(borrows="a"),)}, "layer 0 borrows 'a', but no layer before it lends that"),
        ({"kinds": (LayerKind(lends="a"),) * 2}, "several layers lend 'a'"),
        ({"kinds": (LayerKind(lends="a"), LayerKind(3, borrows="a"))}, "'a' from a layer with other heads or another"),
        ({"layer_inputs": LayerInputsConfig(16, 0)}, "layer_inputs is .*; its sizes must be at least 1"),
        ({"logit_cap": 0.0}, "logit_cap is 0.0; it must be a finite number above 0, or None for no cap"),
        ({"loss_chunks": 17}, "loss_chunks is 17; it must be at most vocab, 16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)
