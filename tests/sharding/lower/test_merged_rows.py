"""Programs that merge time and rows, with time first, and whose rows are sharded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


FACTORS = np.random.default_rng(9).normal(size=(TIME * ROWS, 1)).astype("float32")


def times_constant(w: Any, images: jax.Array) -> jax.Array:
    """The same, but each image has a factor of its own, which the program captures."""
    return convolved(w, images) * FACTORS


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


def moved_elements(compiled: Any) -> list[int]:
    """The elements of each result of an all-gather, all-to-all or collective-permute."""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)", compiled.as_text())
    return [math.prod(map(int, shape.split(","))) if shape else 1 for shape in found]


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
    if words == "dp:8":  # other plans gather parameters or activations
        assert not moved_elements(sharded.lower(params, *batch).compile())


@pytest.mark.whole
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
    assert not [n for n in moved_elements(sharded.lower(w, x).compile()) if n >= 32 * WIDTH]


def test_rows_between_two_other_dimensions_are_merged() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            return (jnp.tanh(x @ w + h),) * 2

        states = lax.scan(cell, jnp.zeros(x.shape[1:]), x)[1]
        return jnp.mean((jnp.tanh(states.reshape(-1, WIDTH) @ w).reshape(x.shape) - x) ** 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - grads, value

    w, x = normal(0, WIDTH, WIDTH), normal(1, TIME, ROWS, 3, WIDTH)
    sharded = plan(step, w, x, target="cpu:8", plan="dp:8").jit(jax.devices()[:8])
    assert_close(jax.jit(step)(w, x), sharded(w, x))
    assert not moved_elements(sharded.lower(w, x).compile())


Layer = Callable[[jax.Array, jax.Array, Any], jax.Array]  # merged rows, weights, further inputs [time, rows]


def added_by_index(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    ids = more["ids"].reshape(-1)
    return x + jnp.zeros((10, WIDTH)).at[ids].add(x @ w)[ids]


def masked(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    return jnp.where(more["rising"].reshape(-1)[:, None] > 2, x @ w, x)


def compared(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    return jax.nn.softmax((x @ w) @ x.T) @ x


def shifted_inside(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    """A scan carries merged rows; its body splits them and moves them along time."""

    def body(x: jax.Array, w: jax.Array) -> Any:
        y = x.reshape(TIME, ROWS, WIDTH)
        return jnp.tanh((y + jnp.roll(y, 1, 0)).reshape(-1, WIDTH) @ w) + x, None

    return lax.scan(body, x, jnp.stack([w, w]))[0]


def overwritten(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    ids = more["ids"].reshape(-1)  # with duplicates
    return x + jnp.zeros((10, WIDTH)).at[ids].set(x @ w)[ids]


def in_sorted_segments(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    ids = more["rising"].reshape(-1)
    return x + jax.ops.segment_sum(x @ w, ids, 10, indices_are_sorted=True)[ids]


def in_groups(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    """Sums over groups of consecutive rows."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    fixed = lax.stop_gradient(x)
    sums = lax.ragged_dot_general(fixed, fixed, jnp.array([10, 40, 14]), numbers)
    return x @ sums[0] + x @ w


def split_rows_first(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    return x + jnp.repeat(jnp.tanh(x.reshape(ROWS, TIME, WIDTH).mean(1) @ w), TIME, 0)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g[::-1].reshape(TIME, ROWS, -1).reshape(g.shape),))


def with_own_gradient(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    return x + doubled(x @ w)


def in_either_branch(x: jax.Array, w: jax.Array, more: Any) -> jax.Array:
    noise = normal(9, TIME * ROWS, 1)
    return lax.cond(more["ids"][0, 0] < 99, lambda x: x @ w + noise, lambda x: x @ w, x)


IN_ANY_ORDER = (added_by_index, masked, compared, shifted_inside)
IN_ORDER = (
    overwritten, in_sorted_segments, in_groups, split_rows_first, with_own_gradient, in_either_branch,
)  # fmt: skip


@pytest.mark.parametrize("layer", [*IN_ANY_ORDER, *IN_ORDER], ids=lambda layer: layer.__name__)
def test_layers_over_merged_rows_compute_what_one_device_computes(layer: Layer) -> None:
    def loss(w: jax.Array, x: jax.Array, more: Any) -> Any:
        def cell(h: jax.Array, x: jax.Array) -> Any:  # runs over time, so that rows are sharded
            h = jnp.tanh(x @ w[0] + h / 2)
            return h, h

        states = lax.scan(cell, jnp.zeros((ROWS, WIDTH)), x)[1]
        y = layer(states.reshape(-1, WIDTH), w[1], more).reshape(x.shape)
        return jnp.mean((y - x) ** 2) + jnp.mean(y[1:] * y[:-1]), y

    def step(w: jax.Array, x: jax.Array, more: Any) -> Any:
        (value, y), grads = jax.value_and_grad(loss, has_aux=True)(w, x, more)
        return w - grads, value, y

    w, x = normal(0, 2, WIDTH, WIDTH), normal(1, TIME, ROWS, WIDTH)
    more = {
        "ids": jax.random.randint(jax.random.key(2), (TIME, ROWS), 0, 10),
        "rising": (jnp.arange(TIME * ROWS) // 7).reshape(TIME, ROWS),
    }
    planned = plan(step, w, x, more, target="cpu:4", plan="dp:4")
    assert_close(jax.jit(step)(w, x, more), planned.jit(jax.devices()[:4])(w, x, more))
    axes = find_axes(build(jax.make_jaxpr(step)(w, x, more)))
    merged = tuple(dim[0] for dim in axes.of_value[axes.program.inputs[1]][:2])
    assert (merged in axes.unordered) == (layer in IN_ANY_ORDER)


@pytest.mark.whole
@pytest.mark.parametrize(
    "options", [{"plan": "dp:4", "microbatches": 2}, {"plan": "pp:2 dp:2", "microbatches": 4}], ids=str
)
def test_rows_are_merged_in_microbatches_and_stages(options: dict[str, Any]) -> None:
    def step(params: Any, x: jax.Array, targets: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            def cell(h: jax.Array, x: jax.Array) -> Any:
                return (jnp.tanh(x + h @ params["memory"]),) * 2

            def layer(h: jax.Array, w: jax.Array) -> Any:
                return h + jnp.tanh(h.reshape(-1, WIDTH) @ w).reshape(h.shape), None

            _, states = lax.scan(cell, jnp.zeros((ROWS, WIDTH)), x)
            states, _ = lax.scan(layer, states, params["layers"])
            return jnp.mean((states.reshape(-1, WIDTH) @ params["judge"] - targets.reshape(-1, 1)) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, grads), value, grads

    params = {"memory": normal(0, WIDTH, WIDTH), "layers": normal(1, 4, WIDTH, WIDTH), "judge": normal(2, WIDTH, 1)}
    batch = normal(3, TIME, ROWS, WIDTH), normal(4, TIME, ROWS)
    axes = find_axes(build(jax.make_jaxpr(step)(params, *batch)))
    assert axes.unordered
    sharded = plan(step, params, *batch, target="cpu:4", **options).jit(jax.devices()[:4])
    assert_close(jax.jit(step)(params, *batch), sharded(params, *batch))
