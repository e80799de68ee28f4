"""Weights without hidden units of their own: tensor parallelism shards them, and their products, all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from autoshard import plan
from tests.sharding.programs import assert_close

HIDDEN, FEATURES = 64, 32
LARGE = 1 / 16  # of all weights

Program = tuple[Callable[..., Any], Any, jax.Array]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def gated_cell() -> Program:
    """A gated recurrent unit (Cho et al., 2014), whose output has the axis of its state."""
    params = {
        gate: {"input": normal(i, FEATURES, HIDDEN), "state": normal(3 + i, HIDDEN, HIDDEN), "bias": jnp.zeros(HIDDEN)}
        for i, gate in enumerate(("update", "reset", "new"))
    }

    def forward(params: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            update, reset, new = (params[gate] for gate in ("update", "reset", "new"))
            z = jax.nn.sigmoid(x @ update["input"] + h @ update["state"] + update["bias"])
            r = jax.nn.sigmoid(x @ reset["input"] + h @ reset["state"] + reset["bias"])
            n = jnp.tanh(x @ new["input"] + r * (h @ new["state"]) + new["bias"])
            return (1 - z) * n + z * h, None

        return jax.lax.scan(cell, jnp.zeros((len(x), HIDDEN)), jnp.swapaxes(x, 0, 1))[0]

    return forward, params, normal(6, 16, 8, FEATURES)


class Recurrent(nn.Module):
    """Two layers of an LSTM whose gates are concatenated before the product."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(HIDDEN))(x)
        return x


class Scanned(nn.Module):
    """The same cell under `nn.scan`, with a product after it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nn.scan(nn.OptimizedLSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
        cell = scan(HIDDEN)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        (_, h), _ = cell(carry, x)
        return nn.Dense(FEATURES)(h)


def flax_model(module: nn.Module) -> Program:
    x = normal(6, 16, 8, FEATURES)
    return module.apply, module.init(jax.random.key(0), x), x


def tied_weight() -> Program:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: jnp.tanh(row @ params["w"]) @ params["w"].T)(x)

    return forward, {"w": normal(0, FEATURES, HIDDEN)}, normal(1, 16, 8, FEATURES)


def depthwise_convolutions() -> Program:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, kernel: jax.Array) -> Any:
            y = jax.lax.conv_general_dilated(
                h, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=FEATURES
            )
            return h + jnp.tanh(y), None

        return jax.lax.scan(layer, x, params["kernels"])[0]

    return forward, {"kernels": normal(0, 3, 5, 1, FEATURES)}, normal(1, 16, 24, FEATURES)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "gru": gated_cell,
    "lstm": lambda: flax_model(Recurrent()),
    "scanned_lstm": lambda: flax_model(Scanned()),
    "tied": tied_weight,
    "depthwise": depthwise_convolutions,
}


def flops(compiled: Any) -> float:
    """FLOPs of one device. XLA counts the body of a loop once."""
    cost = compiled.cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("words", "devices"), [("tp:2", 2), ("fsdp:2 tp:4", 8)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_large_weights_and_their_products_are_sharded(name: str, words: str, devices: int) -> None:
    forward, params, x = PROGRAMS[name]()

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss, grads

    planned = plan(step, params, x, target=f"cpu:{devices}", plan=words)
    single, sharded = jax.jit(step), planned.jit(jax.devices()[:devices])
    assert_close(single(params, x), sharded(params, x))
    specs = jax.tree.leaves(planned.in_specs[0])
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    large = [spec for leaf, spec in zip(jax.tree.leaves(params), specs, strict=True) if leaf.size > LARGE * total]
    assert large and all("tp" in jax.tree.leaves(tuple(spec)) for spec in large)
    counts = [flops(fn.lower(params, x).compile()) for fn in (single, sharded)]
    assert counts[1] < 1.25 * counts[0] / devices


def masked_cell() -> Program:
    """A gated recurrent unit with time before rows, whose state starts again where an episode ends."""
    params = {"inputs": normal(0, HIDDEN, 3, HIDDEN), "state": normal(1, HIDDEN, 3, HIDDEN)}

    def forward(params: Any, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, now: jax.Array) -> Any:
            h = jnp.where(now[:, :1, 0] > 1, 0, h)
            gates = jnp.einsum("bd,dgk->bgk", h, params["state"])
            r, z = jax.nn.sigmoid(now[:, 0] + gates[:, 0]), jax.nn.sigmoid(now[:, 1] + gates[:, 1])
            h = (1 - z) * jnp.tanh(now[:, 2] + r * gates[:, 2]) + z * h
            return h, h

        xs = jnp.einsum("tbd,dgk->tbgk", x, params["inputs"])
        return jax.lax.scan(cell, jnp.zeros((x.shape[1], HIDDEN)), xs)[1]

    return forward, params, normal(2, 4, 32, HIDDEN)


def test_only_the_products_of_a_loop_reshard_its_rows() -> None:
    """A weight is sharded along the hidden units that it sums over, and the rows over the same mesh axis."""
    forward, params, x = masked_cell()

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss, grads

    planned = plan(step, params, x, target="cpu:8", plan="zero1:4 fsdp:2 fsdp+ffn")
    sharded = planned.jit(jax.devices()[:8])
    assert_close(jax.jit(step)(params, x), sharded(params, x))
    loops = [line for line in sharded.lower(params, x).compile().as_text().splitlines() if "while/body" in line]
    moves = [line for line in loops if re.search(r" (all-gather|all-to-all|collective-permute)\(", line)]
    # The rows of the state go to the product and back, in the backward pass also those of its gradient.
    assert len(moves) <= 4, "\n".join(moves)
