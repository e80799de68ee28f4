"""Layers whose input and output have the same axis: tensor parallelism shards one dimension of their square weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard
from tests.sharding.programs import assert_close

SIZE = 64


def normal(seed: int, *shape: int) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)


def residual_layers(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> Any:
        return h + jnp.tanh(h @ w), None

    return jax.lax.scan(layer, x, params)[0]


def recurrence(params: Any, x: jax.Array) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> Any:
        return jnp.tanh(h @ params["recurrent"] + x @ params["input"]), None

    return jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[0]


def mixer(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> Any:
        h = h + jnp.swapaxes(jnp.tanh(jnp.swapaxes(h, 1, 2) @ w["tokens"]), 1, 2)
        return h + jnp.tanh(h @ w["channels"]), None

    return jax.lax.scan(layer, x, params)[0]


def convolutions(params: Any, x: jax.Array) -> jax.Array:
    """The transposed convolution swaps the kernel's channels, so its windows are what both uses have in common."""
    orders = ("NWC", "WIO", "NWC")

    def layer(h: jax.Array, w: jax.Array) -> Any:
        h = h + jnp.tanh(jax.lax.conv_general_dilated(h, w, (1,), "SAME", dimension_numbers=orders))
        back = jax.lax.conv_transpose(h, w, (1,), "SAME", dimension_numbers=orders, transpose_kernel=True)
        return h + jnp.tanh(back), None

    return jax.lax.scan(layer, x, params)[0]


PROGRAMS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "residual": (residual_layers, normal(0, 4, SIZE, SIZE), normal(1, 16, SIZE)),
    "recurrence": (
        recurrence,
        {"recurrent": normal(0, SIZE, SIZE), "input": normal(2, SIZE, SIZE)},
        normal(1, 16, 8, SIZE),
    ),
    "mixer": (
        mixer,
        {"tokens": normal(0, 3, SIZE, SIZE), "channels": normal(2, 3, SIZE, SIZE)},
        normal(1, 16, SIZE, SIZE),
    ),
    "convolutions": (convolutions, normal(0, 2, 3, 16, 16), normal(1, 16, 16, 16)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["tp:8", "fsdp:2 tp:4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_square_weights_are_sharded(name: str, words: str) -> None:
    forward, params, x = PROGRAMS[name]

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss, grads

    planned = auto_shard(step, plan=words)
    assert_close(jax.jit(step)(params, x), planned(params, x))
    plan = planned.plan(params, x)
    weights = [leaf for leaf in plan.inputs if leaf.role == "parameter"]
    assert weights and all("tp" in jax.tree.leaves(tuple(leaf.spec)) for leaf in weights)


def test_only_activations_move() -> None:
    """Each layer scatters its sum and, for the gradient, gathers the gradient of its result once."""
    forward, params, x = PROGRAMS["residual"]
    plan = auto_shard(jax.value_and_grad(lambda p, x: jnp.mean(forward(p, x) ** 2)), plan="tp:8").plan(params, x)
    sizes = {kind: size for kind, _, size, line in plan.traffic if "layer" in line}
    moved = len(params) * x.nbytes * 7 / 8
    assert sizes["reduce-scatter"] == moved and sum(sizes.values()) <= 3 * moved
