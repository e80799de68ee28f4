"""Stacks of layers in a loop or unrolled, stored in one dtype and computed in another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard

LAYERS, WIDTH, HIDDEN, ROWS = 3, 64, 128, 1024


def train_step(compute, unrolled):
    """A train step of layers with two products each. Their weights are two stacks."""

    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"].astype(compute)) @ weights["down"].astype(compute), None

    def loss(stacks, x):
        x = x.astype(compute)
        if unrolled:
            for number in range(LAYERS):
                x, _ = layer(x, {name: stack[number] for name, stack in stacks.items()})
        else:
            x, _ = jax.lax.scan(layer, x, stacks)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(stacks, x):
        value, gradients = jax.value_and_grad(loss)(stacks, x)
        return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), stacks, gradients), value

    return step


def arguments(stored):
    up, down, data = jax.random.split(jax.random.key(0), 3)
    stacks = {
        "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN), jnp.float32) / 8,
        "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH), jnp.float32) / 11,
    }
    return {name: stack.astype(stored) for name, stack in stacks.items()}, jax.random.normal(data, (ROWS, WIDTH))


@pytest.mark.few(6)
@pytest.mark.whole
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize(
    ("stored", "compute", "bytes_each"),
    [
        ("float32", "float32", 4),
        ("float32", "bfloat16", 2),
        ("bfloat16", "float32", 2),
        ("float16", "bfloat16", 2),
        ("float8_e4m3fn", "bfloat16", 2),  # JAX does not promote this pair of dtypes
        ("float32", "float8_e5m2", 1),
    ],
)
def test_each_layer_is_gathered_in_the_narrower_dtype(stored, compute, bytes_each, unrolled, monkeypatch):
    """A stack is never gathered as a whole for one of its layers."""
    monkeypatch.setattr("autoshard.sharding.layout.layout.EARLY_GATHER_SLICE_BYTES", 0)
    plan = autoshard.plan(train_step(compute, unrolled), *arguments(stored), donate_argnums=0, plan="fsdp:8")
    assert plan.axis_rules["fsdp"] == ("batch",)
    gathered = sum(nbytes for kind, *_, nbytes, _ in plan.traffic if kind == "all-gather")
    times = 1 if unrolled else 2  # one gather serves both passes unless they are two loops
    assert gathered == times * 7 / 8 * LAYERS * 2 * WIDTH * HIDDEN * bytes_each


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["fsdp:8", "fsdp:4 tp:2", "zero1:8"])
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize(("stored", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_train_step_equals_one_device(stored, tolerance, unrolled, plan, monkeypatch):
    monkeypatch.setattr("autoshard.sharding.layout.layout.EARLY_GATHER_SLICE_BYTES", 0)
    step, (stacks, x) = train_step(jnp.float32, unrolled), arguments(stored)
    expected, expected_loss = jax.jit(step)(stacks, x)
    updated, loss = autoshard.auto_shard(step, plan=plan)(stacks, x)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, stack in updated.items():
        assert stack.sharding.shard_shape(stack.shape) != stack.shape or "zero1" in plan
        np.testing.assert_allclose(
            stack.astype(jnp.float32), expected[name].astype(jnp.float32), rtol=tolerance, atol=tolerance / 10
        )


def test_a_narrow_parameter_is_gathered_before_its_cast(monkeypatch):
    monkeypatch.setattr("autoshard.sharding.layout.layout.EARLY_GATHER_SLICE_BYTES", 0)
    step = train_step(jnp.float32, unrolled=False)
    text = autoshard.auto_shard(step, plan="fsdp:8").lower(*arguments("bfloat16")).as_text()
    made_whole = [line for line in text.splitlines() if "sharding_constraint" in line and "[{}, {}]" in line]
    assert len(made_whole) == 4 and all("xbf16>" in line for line in made_whole), made_whole
