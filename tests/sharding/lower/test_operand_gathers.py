"""Stored operands of elementwise operators where nothing else shards the result."""

import jax
import jax.numpy as jnp
import pytest

import autoshard

NODES, EDGES, WIDTH = 512, 4096, 64


def step(state, nodes, edges, senders, receivers, wanted):
    """Each edge reads both its nodes, and each node the sum of its edges. A norm has a scale and a bias."""

    def loss(w):
        node = jnp.tanh(nodes @ w["enter"])
        read = jnp.concatenate([edges, node[senders], node[receivers]], axis=-1)
        total = jax.ops.segment_sum(jnp.tanh(read @ w["edge"]), receivers, num_segments=NODES)
        update = jax.nn.relu(jnp.concatenate([node, total], axis=-1) @ w["node"])
        norm = jax.lax.rsqrt(jnp.mean(jnp.square(update), -1, keepdims=True) + 1e-6)
        return jnp.mean(jnp.square((node + update * norm * w["scale"] + w["bias"]) @ w["out"] - wanted))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 11))
    rows = {"enter": WIDTH, "edge": 3 * WIDTH, "node": 2 * WIDTH, "out": WIDTH}
    state = {name: jax.random.normal(next(keys), (size, WIDTH)) / 8 for name, size in rows.items()}
    state |= {name: jax.random.normal(next(keys), (WIDTH,)) for name in ("scale", "bias")}
    nodes, wanted = (jax.random.normal(next(keys), (NODES, WIDTH)) for _ in range(2))
    edges = jax.random.normal(next(keys), (EDGES, WIDTH))
    ends = [jax.random.randint(next(keys), (EDGES,), 0, NODES) for _ in range(2)]
    return state, nodes, edges, *ends, wanted


def constraints(fn, *args, words="fsdp:8"):
    """The sharding constraints in a lowered program that make rows of `WIDTH` elements whole."""
    text = autoshard.auto_shard(fn, plan=words).lower(*args).as_text()
    whole = f"[{{}}, {{}}]> : tensor<1x{WIDTH}xf32>"
    return [line for line in text.splitlines() if "sharding_constraint" in line and whole in line]


def test_a_parameter_does_not_shard_what_the_plan_replicates():
    """No dimension of the nodes is sharded over `fsdp`, so XLA would shard them like the stored scale and bias."""
    assert len(constraints(step, *arguments(), words="fsdp:8 fsdp-nodes")) == 3  # the backward pass uses the scale, too


def test_a_parameter_beside_sharded_rows_has_no_constraint():
    """XLA gathers it in any case."""

    def loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w["out"]) * w["scale"] + w["bias"]))

    def descent(w, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))

    state = {name: arguments()[0][name] for name in ("out", "scale", "bias")}
    assert not constraints(descent, state, jnp.ones((EDGES, WIDTH)))


@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 fsdp:4", "fsdp:4 tp:2", "dp:2 fsdp:4 dp-nodes fsdp-nodes"])
def test_results_are_those_of_one_device(words):
    args = arguments()
    wanted = jax.jit(step)(*args)
    found = autoshard.auto_shard(step, plan=words)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)
