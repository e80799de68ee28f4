"""Searches try the ways of attention over a sharded sequence."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.search import sequence_ways

ROWS, LENGTH, HEADS, HEAD_DIM, WIDTH = 2, 65536, 2, 128, 256


def forward(params, x):
    """Few rows with few heads, so that 8 devices have to shard the sequence."""
    q, k, v = ((x @ params[name]).reshape(ROWS, LENGTH, HEADS, HEAD_DIM) for name in ("wq", "wk", "wv"))
    y = splash_attention(Softmax(Visibility(causal=True), 1.0), q[:, :, :, None], k, v)
    return y.reshape(ROWS, LENGTH, -1) @ params["wo"]


def inputs():
    params = {name: jax.ShapeDtypeStruct((WIDTH, HEADS * HEAD_DIM), jnp.bfloat16) for name in ("wq", "wk", "wv")}
    params["wo"] = jax.ShapeDtypeStruct((HEADS * HEAD_DIM, WIDTH), jnp.bfloat16)
    return params, jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.bfloat16)


def test_the_ways_of_a_plan_that_shards_the_sequence_alone_are_always_priced(monkeypatch):
    monkeypatch.setattr(sequence_ways, "PLANS_WITH_OTHER_ATTENTION", 0)
    plan = autoshard.plan(forward, *inputs(), target="v5p:2x2x2")
    assert any("ring" in name for name, _, _ in plan.candidates)


@pytest.mark.parametrize("mesh", [None, {"a": 2, "b": 4}])
def test_a_search_finds_a_way_that_is_faster_than_gathered_keys_alone(mesh):
    params, x = inputs()
    plan = autoshard.plan(forward, params, x, mesh=mesh, target="v5p:2x2x2")
    times = {name: time for name, time, _ in plan.candidates}
    cp, ring = ("dp:2 cp:4", "dp:2 ring:4") if mesh is None else ("a=dp:2 b=cp:4", "a=dp:2 b=ring:4")
    assert times[ring] < times[cp]
    assert plan.sequence
    again = autoshard.plan(forward, params, x, mesh=mesh, target="v5p:2x2x2", plan=plan.chosen)
    assert again.estimate.step_time_us == pytest.approx(plan.estimate.step_time_us)
