"""Steps whose state is data: the rows of a cache are the batch, and the weights are parameters."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.axes.carried_rows import carried_batch
from autoshard.sharding.axes.logical_axes import find_axes
from autoshard.sharding.program.tracing import trace


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def decode(weights, state, active):
    """One step of a language model that keeps a mean of its embeddings: each row is computed from itself."""
    kept = state["kept"] * 0.5 + weights["embed"][state["tokens"]]
    tokens = jnp.argmax(jnp.tanh(kept @ weights["up"]) @ weights["head"], axis=-1)
    return {"kept": kept, "tokens": jnp.where(active, tokens, state["tokens"]).astype(jnp.int32)}


def test_weights_beside_a_carried_cache_are_parameters():
    weights = dict(zip(("embed", "up", "head"), shapes((64, 32), (32, 48), (48, 64)), strict=True))
    state = {"kept": shapes((16, 32))[0], "tokens": jax.ShapeDtypeStruct((16,), jnp.int32)}
    active = jax.ShapeDtypeStruct((16,), jnp.bool_)
    made = autoshard.plan(decode, weights, state, active, target="v5e:2x2", plan="fsdp:4")
    assert [leaf.role for leaf in made.inputs] == ["parameter"] * 3 + ["data"] * 3
    assert all(leaf.spec[0] for leaf in made.inputs if leaf.role == "data")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_state_of_a_train_step_is_not_data(frozen):
    def step(state, fixed, x):
        def loss(w):
            return jnp.sum(jnp.tanh(x @ w) @ fixed)

        return {"w": state["w"] - jax.grad(loss)(state["w"]), "count": state["count"] + 1}

    state = {"w": shapes((32, 64))[0], "count": jax.ShapeDtypeStruct((), jnp.int32)}
    fixed, x = shapes((64, 8), (16, 32))
    if frozen:
        traced = trace(step, (state, fixed, x), {})
    else:
        traced = trace(lambda state, x: step(state, jnp.ones((64, 8)), x), (state, x), {})
    inputs = [traced.program.inputs[i] for i, _ in traced.state]
    assert inputs and carried_batch(traced.program, find_axes(traced.program), inputs) is None


def test_weights_that_are_decoded_do_not_hide_the_rows():
    def step(weights, state):
        blocks = weights["codes"].astype(jnp.float32).reshape(16, 128, 4096) * weights["scale"][:, None, None]
        up = blocks.reshape(2048, 4096)
        kept = state["kept"] + jnp.tanh(state["kept"] @ up) @ up.T
        return {"kept": kept, "tokens": state["tokens"] + jnp.argmax(kept, -1).astype(jnp.int32)}

    weights = {"codes": jax.ShapeDtypeStruct((2048, 4096), jnp.float8_e4m3fn), "scale": shapes((16,))[0]}
    state = {"kept": shapes((2, 2048))[0], "tokens": jax.ShapeDtypeStruct((2,), jnp.int32)}
    traced = trace(step, (weights, state), {})
    axes, inputs = find_axes(traced.program), [traced.program.inputs[i] for i, _ in traced.state]
    batch = carried_batch(traced.program, axes, inputs)
    assert batch is not None and axes.sizes[batch] == 2
