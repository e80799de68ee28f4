"""The end of a layer: its own vectors through a gate, and the stored factor of its result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from autoshard.models.decoder import DecoderConfig, LayerKind
from autoshard.models.decoder.block import Block
from autoshard.models.decoder.kinds import LayerInputsConfig
from autoshard.models.decoder.stacks import make_sides
from tests.models.small import quickly

CONFIG = DecoderConfig(
    vocab=16, width=8, kinds=(LayerKind(),), heads=2, kv_heads=1, head_dim=4, ffn=16, context=32, init_std=0.5,
    layer_scale=True, layer_inputs=LayerInputsConfig(16, 4),
)  # fmt: skip
X, INPUTS = (np.random.default_rng(n).normal(size=(1, 3, n)).astype("float32") for n in (8, 4))


def test_vectors_are_added_through_a_gate_and_the_result_is_scaled():
    graph, state = nnx.split(Block(CONFIG, LayerKind(), jax.random.key(0)))
    state["scale"][...] = jnp.array([3.0])
    weights: Any = state["gate"]

    def total(state) -> Any:
        # In the second row there are no vectors: the gate adds nothing.
        inputs = jnp.concatenate([INPUTS, jnp.zeros_like(INPUTS)])
        sides = make_sides(CONFIG, jnp.arange(3)[None], None)
        found: Any = nnx.merge(graph, state)(jnp.concatenate([X, X]), inputs, sides)
        return jnp.sum(found), found

    (_, (found, before)), gradient = quickly(jax.value_and_grad(total, has_aux=True), state)
    x = np.asarray(before) / 3.0
    gate = x @ np.asarray(weights["w_gate"][...])
    added = (gate / (1 + np.exp(-gate)) * INPUTS[0]) @ np.asarray(weights["w_up"][...])
    added = added / np.sqrt(np.mean(added**2, axis=-1, keepdims=True) + CONFIG.norm_eps)
    np.testing.assert_allclose(found, 3.0 * (x + added), atol=1e-4)
    assert not np.any(gradient["scale"][...]) and np.any(gradient["gate"]["w_up"][...])
