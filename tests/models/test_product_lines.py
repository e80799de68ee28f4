"""The lines that plans name for the products of our models."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from autoshard.models import GPT, Decoder, DecoderConfig
from autoshard.models.decoder import LayerKind
from autoshard.spmdrules.ir.program import build
from tests.models.small import TINY

DECODER = DecoderConfig(
    kinds=(LayerKind(),) * 2, vocab=32, width=16, heads=4, kv_heads=2, head_dim=4, ffn=24, context=32
)


@pytest.mark.parametrize(
    "model", [lambda rngs: GPT(TINY, rngs=rngs), lambda rngs: Decoder(DECODER, rngs=rngs)], ids=["gpt", "decoder"]
)
def test_each_product_of_a_layer_has_a_line_of_its_own(model) -> None:
    made = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
    graph, state = nnx.split(made)
    program = build(
        jax.make_jaxpr(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, jnp.zeros((2, 8), int))
    )
    lines = {op.line for op in program.ops() if op.name == "dot_general"}
    functions = {re.sub(r".*\((.*)\)", r"\1", line) for line in lines}
    assert {"MLP.__call__", "Attention._project"} <= functions
    assert not {"project", "times", "quantized_einsum"} & functions
    assert len([line for line in lines if "MLP" in line]) == 3
