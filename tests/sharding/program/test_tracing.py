"""The state of a function: the arguments that it returns, each matched with one result."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.sharding.program.tracing import trace
from tests.sharding.programs import batch, mlp_state


def state_of(fn, *args):
    """Pairs of the path of an input leaf and the path of the result that is its updated value."""
    traced = trace(fn, args, {})
    return [(traced.in_paths[i], traced.out_paths[o]) for i, o in traced.state]


def test_a_subtree_of_the_results_is_the_state_of_one_argument():
    def add(params, others, x):
        return jax.tree.map(jnp.add, params, others), x.sum()

    pairs = state_of(add, mlp_state(), mlp_state(), batch())
    assert pairs == [("0/b", "0/b"), ("0/v", "0/v"), ("0/w", "0/w")]


def test_two_arguments_of_the_same_structure_are_both_state():
    def swap(params, moments, x):
        return moments, params

    pairs = state_of(swap, mlp_state(), mlp_state(), batch())
    assert len(pairs) == 6 and len({o for _, o in pairs}) == 6


def test_arrays_that_change_their_dtype_are_not_state():
    def narrow(params, x):
        return {k: v.astype(jnp.bfloat16) for k, v in params.items()}, x.sum()

    assert state_of(narrow, mlp_state(), batch()) == []


def test_a_single_array_is_state_only_at_its_own_index():
    def step(w, x):
        return w - x.sum(), x * 2

    assert state_of(step, jnp.ones((8, 8)), batch()) == [("0", "0"), ("1", "1")]
    assert state_of(lambda w, x: (x * 2, w.sum()), jnp.ones((8, 8)), batch()) == []
    assert state_of(lambda x: x * 2, batch()) == []


def test_an_error_of_the_function_says_what_it_was_called_with():
    def step(state, batch):
        return state["params"] * batch["x"]

    with pytest.raises(KeyError, match="params") as caught:
        trace(step, ({"x": jnp.ones((8, 4))}, {"params": jnp.ones(4)}), {})
    expected = "auto_shard(step): the function was called with state/x float32[8,4]; batch/params float32[4]"
    assert caught.value.__notes__[-1] == expected
