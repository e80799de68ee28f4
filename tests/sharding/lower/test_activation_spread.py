"""Activations that the plan replicates over a mesh axis beside parameters and gradients that are sharded over it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard

ROWS, SEQ, WIDTH, HEADS, LAYERS = 16, 6, 64, 4, 2
WORDS = "dp:4 tp:2 state"  # activations are whole along the width; scales and biases are sharded along it


def block(x, w):
    """A norm with scale and bias, attention without projections of its own, and an MLP whose result gets a bias."""
    mean = jnp.mean(x, -1, keepdims=True)
    norm = (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6)
    heads = jnp.einsum("bte,ehd->bhtd", norm * w["scale"] + w["bias"], w["enter"])
    mixed = jax.nn.softmax(heads @ heads.swapaxes(-1, -2)) @ heads
    x = x + jnp.einsum("bhtd,hde->bte", mixed, w["leave"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"] + w["last"]


def step(state, x, labels):
    """Patches behind a class token, with positions, through layers in a loop to classes."""

    def loss(state):
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), state)
        token = jnp.broadcast_to(w["token"], (ROWS, 1, WIDTH))
        y = jnp.concatenate([token, x @ w["patch"]], axis=1) + w["places"]
        y, _ = jax.lax.scan(lambda y, layer: (jax.checkpoint(block)(y, layer), None), y, w["layers"])
        logits = (y[:, 0] @ w["head"]).astype(state["head"].dtype)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


def arguments(dtype):
    """The state in float32, images in `dtype`, labels."""
    keys = iter(jax.random.split(jax.random.key(0), 20))
    layer = {"scale": (WIDTH,), "bias": (WIDTH,), "last": (WIDTH,), "up": (WIDTH, 256), "down": (256, WIDTH)}
    layer |= {"enter": (WIDTH, HEADS, WIDTH // HEADS), "leave": (HEADS, WIDTH // HEADS, WIDTH)}
    shapes = {"token": (1, 1, WIDTH), "places": (SEQ + 1, WIDTH), "patch": (48, WIDTH), "head": (WIDTH, 16)}
    state: dict[str, Any] = {name: jax.random.normal(next(keys), shape) / 8 for name, shape in shapes.items()}
    state["layers"] = {name: jax.random.normal(next(keys), (LAYERS, *shape)) / 8 for name, shape in layer.items()}
    images = jax.random.normal(next(keys), (ROWS, SEQ, 48)).astype(dtype)
    return state, images, jax.random.randint(next(keys), (ROWS,), 0, 16)


@pytest.mark.parametrize(("words", "most"), [(WORDS, 0), ("dp:4 cp:2 state", 1)])
def test_stored_vectors_and_their_gradients_do_not_shard_activations(words, most):
    """XLA would compute norms and residual sums on shards of the width, and gather them before each product.

    `cp` shards the patches, but not the sequence with the token. One gather between them is planned.
    """
    text = autoshard.auto_shard(step, plan=words).lower(*arguments("bfloat16")).compile().as_text()
    gathers = re.findall(rf"= \w+\[\d+,(?:{SEQ + 1}|{SEQ + 2}),{WIDTH}\]\S* all-gather", text)
    assert len(gathers) <= most


def test_a_parameter_is_gathered_if_one_of_its_mesh_axes_does_not_shard_the_result():
    """The batch is sharded over `dp`, and the token and the positions over `dp` and `tp`."""
    text = autoshard.auto_shard(step, plan=WORDS).lower(*arguments("bfloat16")).as_text()
    for rows in (1, SEQ + 1):
        assert re.search(rf"sharding_constraint .* \[{{}}, {{}}, {{}}\]> : tensor<1x{rows}x{WIDTH}xbf16>", text)


@pytest.mark.parametrize("words", [WORDS, "fsdp:4 tp:2", "zero1:4 tp:2 seq", "dp:2 fsdp:2 tp:2"])
def test_results_are_those_of_one_device(words):
    args = arguments("float32")
    wanted = jax.jit(step)(*args)
    found = autoshard.auto_shard(step, plan=words)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)
