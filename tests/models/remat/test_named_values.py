"""Named values: which values a policy moves to the host, and that loss and gradients stay the same."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard.models import GPT, GPTConfig, MoE, MoEConfig, ViT, ViTConfig, loss_fn, restack
from autoshard.models.remat.named_values import NAMED_VALUES
from tests.models.small import GPT2, TINY, filled, filled_as, quickly

ALL = f"host:{'+'.join(NAMED_VALUES)}"
Q, KV, ROW = (2, 9, 4, 4), (2, 9, 2, 4), (2, 9, 16)  # of `TINY`
MOE = MoEConfig(dataclasses.replace(TINY, layers=2), experts=4, expert_ffn=8)
IMAGES = ViTConfig(image_size=8, patch=4, classes=4, layers=2, heads=2, width=16, ffn=32)


def jaxprs(jaxpr):
    """Yields a jaxpr and those in it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from jaxprs(inner)


def offloaded(loss, *args):
    """Counts what the gradient of a loss moves to the host, as (name, shape)."""
    found = Counter()
    for jaxpr in jaxprs(jax.make_jaxpr(jax.grad(loss))(*args).jaxpr):
        names = {e.outvars[0]: e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}
        for equation in jaxpr.eqns:
            if equation.primitive.name == "device_put" and jax.memory.Space.Host in equation.params["devices"]:
                found.update((names[v], v.aval.shape) for v in equation.invars)
    return found


def count(loss, params, primitive):
    """Counts the equations with a primitive in the gradient of a loss."""
    found = jaxprs(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    return sum(e.primitive.name == primitive for jaxpr in found for e in jaxpr.eqns)


def gpt_loss(cfg):
    """The loss of a GPT as a function of its parameters, and the parameters."""
    graph, params = nnx.split(filled(dataclasses.replace(cfg, scan_layers=True)))
    if not cfg.scan_layers:
        graph, params = nnx.split(restack(filled(dataclasses.replace(cfg, scan_layers=True)), scan_layers=False))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, cfg.vocab)

    def loss(params):
        total, weight = loss_fn(nnx.merge(graph, params), tokens, tokens[:, ::-1])
        return total / weight

    return loss, params


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("remat", "expected"),
    [
        ("none", {}),
        ("full", {}),
        ("keep:qkv+context", {}),
        ("host:residual", {("residual", ROW): 1}),
        ("host:qkv", {("qkv", Q): 1, ("qkv", KV): 2}),
        ("host:context keep:qkv", {("context", (2, 9, 2, 2, 4)): 1}),
        ("host:out_proj", {("out_proj", ROW): 1}),
        ("host:mlp_in", {("mlp_in", (2, 9, 24)): 2}),
        ("host:mlp_out", {}),  # the next layer's `residual`
        ("host:residual,none", {("residual", ROW): 1}),
    ],
)
def test_what_a_policy_moves_to_the_host(remat, expected):
    assert offloaded(*gpt_loss(dataclasses.replace(TINY, remat=remat))) == expected
    unrolled = offloaded(*gpt_loss(dataclasses.replace(TINY, remat=remat, scan_layers=False)))
    assert unrolled == {key: n * (1 if "," in remat else 2) for key, n in expected.items()}


def test_experts_with_a_capacity_read_their_own_results():
    def moved(**changes):
        cfg = dataclasses.replace(MOE, gpt=dataclasses.replace(MOE.gpt, remat="host:mlp_in+mlp_out"), **changes)
        graph, params = nnx.split(filled_as(lambda rngs: MoE(cfg, rngs=rngs)))
        batch = {
            "inputs": jnp.ones((2, 8), jnp.int32),
            "targets": jnp.ones((2, 8), jnp.int32),
            "mask": jnp.ones((2, 8)),
        }
        return {name for name, _ in offloaded(lambda p: nnx.merge(graph, p).loss(batch)[0], params)}

    assert moved() == {"mlp_in", "mlp_out"}
    assert moved(dispatch="dropless") == set()


def test_blockwise_attention_is_not_run_again_if_its_context_is_kept():
    cfg = dataclasses.replace(TINY, attention="blockwise", block_size=4)
    scans = {r: count(*gpt_loss(dataclasses.replace(cfg, remat=r)), "scan") for r in ("full", "keep:qkv+context")}
    assert scans["full"] == scans["keep:qkv+context"] + 1
    moved = offloaded(*gpt_loss(dataclasses.replace(cfg, remat="host:context")))
    assert moved == {("context", (2, 9, 2, 2, 4)): 1, ("context", (2, 2, 2, 9)): 1}


def test_names_of_maxtext_occur_once():
    names = [name for value in NAMED_VALUES.values() for name in value.maxtext]
    assert len(names) == len({*names}) and "decoder_layer_input" in NAMED_VALUES["residual"].maxtext


def same(loss, params, other, others):
    expected, actual = (quickly(jax.value_and_grad(fn), p) for fn, p in ((loss, params), (other, others)))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual[1], expected[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("cfg", "remat"),
    [
        (TINY, ALL),
        (TINY, "host:residual+qkv keep:out_proj"),
        pytest.param(TINY, "host:residual,keep:context", marks=pytest.mark.slow),
        pytest.param(GPT2, ALL, marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(TINY, attention="blockwise", block_size=4), ALL, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_of_a_gpt(cfg, remat, scan):
    cfg = dataclasses.replace(cfg, scan_layers=scan)
    same(*gpt_loss(cfg), *gpt_loss(dataclasses.replace(cfg, remat=remat)))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dispatch": "dropless"}, {"moe_every": 2, "shared_experts": 1}])
def test_loss_and_gradients_of_experts(changes):
    def loss_of(remat):
        cfg = dataclasses.replace(MOE, gpt=dataclasses.replace(MOE.gpt, remat=remat), **changes)
        graph, params = nnx.split(filled_as(lambda rngs: MoE(cfg, rngs=rngs)))
        tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, cfg.vocab)
        batch = {"inputs": tokens, "targets": tokens[:, ::-1], "mask": jnp.ones((2, 8))}
        return lambda p: nnx.merge(graph, p).loss(batch)[0], params

    same(*loss_of("none"), *loss_of(ALL))


@pytest.mark.slow
def test_loss_and_gradients_of_a_vit():
    def loss_of(remat):
        cfg = dataclasses.replace(IMAGES, remat=remat)
        graph, params = nnx.split(filled_as(lambda rngs: ViT(cfg, rngs=rngs)))
        images = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
        batch = {"images": images, "labels": jnp.array([0, 3])}
        return lambda p: nnx.merge(graph, p).loss(batch)[0], params

    same(*loss_of("none"), *loss_of(ALL))
    assert {name for name, _ in offloaded(*loss_of(ALL))} == {*NAMED_VALUES} - {"mlp_out"}


def test_a_name_has_no_effect_outside_of_checkpoint():
    cfg = GPTConfig(vocab=8, layers=1, heads=2, width=8, context=4)
    text = str(
        jax.make_jaxpr(lambda x: nnx.merge(*nnx.split(GPT(cfg, rngs=nnx.Rngs(0))))(x))(jnp.ones((1, 4), jnp.int32))
    )
    assert "name=residual" in text and "device_put" not in text
