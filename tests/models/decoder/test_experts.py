"""The load of experts, and the loss that balances it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.decoder.experts import Experts, Load
from autoshard.models.decoder.kinds import ExpertsConfig
from tests.models.small import called, filled_as

SIZES: dict[str, Any] = dict(vocab=16, width=8, heads=2, kv_heads=1, head_dim=4, ffn=16, context=32)
CONFIG = DecoderConfig(kinds=(LayerKind(experts=True),) * 2, experts=ExpertsConfig(4, 2, 8), **SIZES)


def test_an_even_load_has_the_smallest_loss() -> None:
    logits = jnp.zeros((1, 4, 4))
    even = jnp.array([[[0, 1], [2, 3], [0, 1], [2, 3]]])
    assert float(Load.of(logits, even).loss()) == 2  # the number of choices
    one_sided = jnp.zeros((1, 4, 4)).at[..., 0].set(5.0)
    assert Load.of(one_sided, jnp.zeros_like(even)).loss() > 4


def test_training_adds_the_loss_of_all_layers_together_and_evaluation_does_not() -> None:
    config = dataclasses.replace(CONFIG, router_loss=0.5)
    model, without = (filled_as(lambda rngs, each=each: Decoder(each, rngs=rngs)) for each in (config, CONFIG))
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 16)
    batch = {"inputs": tokens, "targets": tokens, "mask": jnp.ones((2, 6)).at[0, 3:].set(0)}
    total, count = called(model, lambda model: model.loss(batch))
    plain = called(model, lambda model: model.loss(batch, deterministic=True)[0])
    load = called(model, lambda model: model._run(tokens, None, None, load=Load.none(4))[1])
    assert float(load.positions) == 2 * 12 and float(load.counts.sum()) == 2 * 2 * 12
    np.testing.assert_allclose((total - plain) / count, 0.5 * load.loss(), rtol=1e-5)
    np.testing.assert_array_equal(called(without, lambda model: model.loss(batch)[0]), plain)


def test_a_factor_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router_loss is 0\.5, but no layer has experts"):
        DecoderConfig(kinds=(LayerKind(),), router_loss=0.5, **SIZES)
    with pytest.raises(ValueError, match=r"router_loss is -1"):
        dataclasses.replace(CONFIG, router_loss=-1)


def test_a_gate_of_the_input_multiplies_what_the_expert_gets() -> None:
    own = ExpertsConfig(4, 1, 8, scoring="sigmoid", renormalize=False, gated_input=True, shared_ffn=8)
    experts = Experts(dataclasses.replace(CONFIG, experts=own), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 5, 8))
    logits = x[0] @ experts.router[...]
    assert experts.shared is not None
    expected = experts.shared(x)[0]
    for position, chosen in enumerate(jnp.argmax(logits, axis=-1).tolist()):
        given = x[0, position] * jax.nn.sigmoid(logits[position, chosen])
        hidden = jax.nn.silu(given @ experts.w_gate[chosen]) * (given @ experts.w_up[chosen])
        expected = expected.at[position].add(hidden @ experts.w_down[chosen])
    np.testing.assert_allclose(experts(x)[0], expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"gated_input is True and top_k is 2"):
        dataclasses.replace(CONFIG, experts=dataclasses.replace(own, top_k=2))
