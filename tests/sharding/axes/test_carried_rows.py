"""Steps whose state is data: the rows of a cache are the batch, and the weights are parameters."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.axes.carried_rows import state_is_data
from autoshard.sharding.axes.logical_axes import find_axes
from autoshard.sharding.program.tracing import trace


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def decode(weights, state, new):
    """One step of a recurrent model: each row of the state is computed from itself."""
    hidden = jnp.tanh(state["h"] @ weights["a"] + new @ weights["b"])
    return {"h": hidden, "length": state["length"] + 1}


WEIGHTS = dict(zip("ab", shapes((64, 64), (32, 64)), strict=True))
STATE = {"h": shapes((16, 64))[0], "length": jax.ShapeDtypeStruct((16,), jnp.int32)}


def test_weights_beside_a_carried_cache_are_parameters():
    made = autoshard.plan(decode, WEIGHTS, STATE, *shapes((16, 32)), target="v5e:2x2", plan="fsdp:4")
    assert [leaf.role for leaf in made.inputs] == ["parameter", "parameter", "data", "data", "data"]
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
    assert inputs and not state_is_data(traced.program, find_axes(traced.program), inputs)
