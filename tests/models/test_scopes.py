"""The parts of a model have named scopes, which are the ends of the paths of their parameters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from autoshard.models.decoder import Decoder, DecoderConfig, LayerKind
from autoshard.models.gpt import GPT, GPTConfig
from autoshard.sharding.audit.named_collectives import module_scope, scope_of_path

TOKENS = jnp.zeros((2, 4), jnp.int32)
SCOPES = {"embed", "layers/attention_norm", "layers/attention", "layers/mlp_norm", "layers/mlp", "norm", "head"}


def make_decoder() -> nnx.Module:
    cfg = DecoderConfig(
        vocab=16, width=8, kinds=(LayerKind(),) * 2, heads=2, kv_heads=2, head_dim=4, ffn=16, context=8, tie_head=False
    )
    return Decoder(cfg, rngs=nnx.Rngs(0))


def make_gpt() -> nnx.Module:
    return GPT(GPTConfig(vocab=16, width=8, heads=2, layers=2, context=8, tie_head=False), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [make_decoder, make_gpt])
def test_products_are_in_the_scope_of_their_parameters(make: Any) -> None:
    graph, state = nnx.split(make())

    def loss(state: Any) -> Any:
        return nnx.merge(graph, state).loss({"inputs": TOKENS, "targets": TOKENS, "mask": TOKENS})[0]

    text = jax.jit(jax.grad(loss)).lower(state).compile().as_text()
    scopes = {module_scope(name) for name in re.findall('op_name="([^"]*)"', text or "")}
    assert scopes >= SCOPES
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    for path in paths:
        expected = path.rpartition("/")[0].rpartition("/")[2] or path
        assert scope_of_path(path, scopes).endswith(expected), path
