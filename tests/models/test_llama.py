"""Llama: published sizes, memory for a long context, and training of the small model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models import GPT, LLAMA, loss_fn, workload
from tests.models.small import count, intermediate_shapes, text_entropy, trained

# Counted in the published checkpoints.
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}


def build(cfg):
    return lambda rngs: GPT(cfg, rngs=rngs)


def test_every_size_is_published():
    assert set(LLAMA) == set(PARAMETERS)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert count(build(LLAMA[name])) == PARAMETERS[name]


def test_unrolled_layers_have_the_same_number_of_parameters():
    unrolled = dataclasses.replace(LLAMA["llama2-7b"], scan_layers=False)
    assert count(build(unrolled)) == PARAMETERS["llama2-7b"]


@pytest.mark.parametrize("scan", [True, False])
def test_a_long_context_never_holds_all_scores(scan):
    """Traced at full size: no value of forward or backward pass has the sequence length, 8192, in two dimensions."""
    cfg = dataclasses.replace(LLAMA["llama3-8b"], scan_layers=scan, layers=2)
    graph, params = nnx.split(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, cfg.context), jnp.int32)

    def loss(params, tokens):
        return loss_fn(nnx.merge(graph, params), tokens, tokens)[0]

    def held(params, graph):
        shapes = intermediate_shapes(jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr)
        return max(sum(size == cfg.context for size in shape) for shape in shapes)

    assert held(params, graph) == 1
    graph, params = nnx.split(
        nnx.eval_shape(lambda: GPT(dataclasses.replace(cfg, attention="plain"), rngs=nnx.Rngs(0)))
    )
    assert held(params, graph) == 2


def test_it_computes_in_bfloat16_and_keeps_float32():
    model = nnx.eval_shape(lambda: GPT(dataclasses.replace(LLAMA["llama3-8b"], layers=1), rngs=nnx.Rngs(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    graph, params = nnx.split(model)
    logits = jax.eval_shape(
        lambda params, x: nnx.merge(graph, params)(x), params, jax.ShapeDtypeStruct((1, 8), "int32")
    )
    assert logits.dtype == jnp.bfloat16 and logits.shape == (1, 8, 128_256)


@pytest.mark.slow
@pytest.mark.whole
def test_it_learns():
    losses, *_ = trained(workload("llama-tiny").with_(batch_size=8), 40)
    assert losses[0] == pytest.approx(np.log(128), abs=0.15)
    assert np.mean(losses[-5:]) < text_entropy() - 0.3
