"""Programs that merge time and rows, with time first, and whose rows are sharded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import plan
from autoshard.sharding.axes.logical_axes import LogicalAxes, find_axes
from autoshard.spmdrules.ir.program import build
from tests.sharding.programs import assert_close

TIME, ROWS, WIDTH = 4, 16, 8

Encoder = Callable[[Any, jax.Array], jax.Array]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def convolved(w: Any, images: jax.Array) -> jax.Array:
    """Features of `[n, 4, 4, 2]` images."""
    x = lax.conv_general_dilated(images, w["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(x.reshape(len(x), -1)) @ w["enter"]


def numbered(w: Any, images: jax.Array) -> jax.Array:
    """The same, but the images are numbered, so that their order matters."""
    return convolved(w, images) * jnp.sin(jnp.arange(len(images)))[:, None]


def shifted(w: Any, images: jax.Array) -> jax.Array:
    """The same, but each image adds the features of the next one."""
    x = convolved(w, images)
    return x + jnp.concatenate([x[1:], x[:1]])


def times_constant(w: Any, images: jax.Array) -> jax.Array:
    """The same, but each image has a factor of its own, which the program captures."""
    return convolved(w, images) * normal(9, len(images), 1)


def program(encoder: Encoder) -> tuple[Callable[..., Any], Any, tuple[jax.Array, jax.Array]]:
    """A recurrent actor: merged rows are encoded, a GRU scans over time, and returns are scanned from the end."""
    params = {
        "kernel": normal(0, 2, 2, 2, 4),
        "enter": normal(1, 16, WIDTH),
        "inputs": normal(2, WIDTH, 3 * WIDTH),
        "memory": normal(3, WIDTH, 3 * WIDTH),
        "judge": normal(4, WIDTH, 1),
    }

    def loss(w: Any, images: jax.Array, rewards: jax.Array) -> jax.Array:
        @jax.checkpoint
        def encode(w: Any) -> jax.Array:
            return encoder(w, images.reshape(-1, *images.shape[2:])).reshape(TIME, ROWS, WIDTH)

        def cell(h: jax.Array, x: jax.Array) -> Any:
            inputs, states = jnp.split(x @ w["inputs"], 3, -1), jnp.split(h @ w["memory"], 3, -1)
            z, r = jax.nn.sigmoid(inputs[0] + states[0]), jax.nn.sigmoid(inputs[1] + states[1])
            h = (1 - z) * jnp.tanh(inputs[2] + r * states[2]) + z * h
            return h, h

        _, states = lax.scan(cell, jnp.zeros((ROWS, WIDTH)), encode(w))
        values = (states.reshape(-1, WIDTH) @ w["judge"]).reshape(TIME, ROWS)

        def back(later: jax.Array, now: jax.Array) -> Any:
            return (now + 0.9 * later,) * 2

        _, returns = lax.scan(back, jnp.zeros(ROWS), rewards, reverse=True)
        return jnp.mean((values - returns) ** 2)

    def step(params: Any, images: jax.Array, rewards: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, images, rewards)
        return jax.tree.map(lambda p, g: p - g, params, grads), value, grads

    return step, params, (normal(5, TIME, ROWS, 4, 4, 2), normal(6, TIME, ROWS))


def gathered_elements(compiled: Any) -> list[int]:
    """The elements of each result of an all-gather or all-to-all."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all)", compiled.as_text())
    return [eval(shape.replace(",", "*") or "1") for shape in found]  # noqa: S307


def axes_of(encoder: Encoder) -> LogicalAxes:
    step, params, batch = program(encoder)
    return find_axes(build(jax.make_jaxpr(step)(params, *batch)))


@pytest.mark.parametrize("words", ["dp:8", "zero1:2 fsdp:4", "dp:2 tp:4"])
def test_each_device_merges_its_own_rows(words: str) -> None:
    step, params, batch = program(convolved)
    planned = plan(step, params, *batch, target="cpu:8", plan=words)
    sharded = planned.jit(jax.devices()[:8])
    assert_close(jax.jit(step)(params, *batch), sharded(params, *batch))
    kinds = {kind for kind, _, wire_bytes, line in planned.traffic if wire_bytes > 1 and "encode" in line}
    assert kinds <= {"all-reduce", "reduce-scatter"}  # of gradients
    if "tp" not in words:  # the products of tensor parallelism gather activations
        moved = gathered_elements(sharded.lower(params, *batch).compile())
        assert all(n < TIME * ROWS * WIDTH for n in moved)


@pytest.mark.parametrize("encoder", [numbered, shifted, times_constant])
def test_rows_whose_order_matters_stay_in_order(encoder: Encoder) -> None:
    step, params, batch = program(encoder)
    planned = plan(step, params, *batch, target="cpu:8", plan="dp:8")
    assert_close(jax.jit(step)(params, *batch), planned.jit(jax.devices()[:8])(params, *batch))
    assert not axes_of(encoder).unordered and axes_of(convolved).unordered


def test_both_merged_dimensions_may_be_sharded() -> None:
    """Tokens are flattened, and mesh axes shard the rows and the sequence."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            flat = jnp.tanh(x.reshape(-1, WIDTH) @ w)
            return x + flat.reshape(x.shape), None

        return jnp.mean(lax.scan(layer, x, w)[0] ** 2)

    def step(w: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - grads, value

    w, x = normal(0, 3, WIDTH, WIDTH), normal(1, 8, 32, WIDTH)
    planned = plan(step, w, x, target="cpu:8", plan="dp:2 cp:4")
    sharded = planned.jit(jax.devices()[:8])
    assert_close(jax.jit(step)(w, x), sharded(w, x))
    assert not [n for n in gathered_elements(sharded.lower(w, x).compile()) if n >= 32 * WIDTH]
