"""Experts without tokens, also all experts of a device, change nothing: results and gradients equal one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard import auto_shard
from autoshard.models import GPTConfig, MoE, MoEConfig
from autoshard.train.step.train_step import loss_and_weight
from tests.models.small import filled_as
from tests.sharding.programs import assert_close

SMALL = GPTConfig(vocab=32, layers=1, heads=8, width=16, ffn=32, context=8)


@cache
def program(dispatch):
    """Return a step, and arguments in which all tokens choose the experts 0 and 1: all logits of the router are 0."""
    config = MoEConfig(SMALL, experts=8, moe_every=1, capacity_factor=4.0, dispatch=dispatch)
    graph, params = nnx.split(filled_as(lambda rngs: MoE(config, rngs=rngs), 0.3))
    params = jax.tree.map_with_path(lambda path, w: w * 0 if "router" in jax.tree_util.keystr(path) else w, params)
    ids = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones((16, 8), np.float32)}

    def step(params, batch):
        def loss(params):
            total, weight = loss_and_weight(nnx.merge(graph, params), batch, None)
            return total / weight

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(jnp.subtract, params, gradients), value, gradients

    return step, (params, batch)


@cache
def single(dispatch):
    step, args = program(dispatch)
    return jax.device_get(jax.jit(step)(*args))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "words"),
    [
        ("capacity", "fsdp:2 ep:2 tp:2"),
        ("dropless", "ep:8"),
        pytest.param("capacity", "ep:8", marks=pytest.mark.slow),
        pytest.param("dropless", "dp:2 ep:4", marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_equal_one_device(dispatch, words):
    step, args = program(dispatch)
    made = jax.device_get(auto_shard(step, plan=words)(*args))
    assert_close(single(dispatch), made)
    leaves = [(jax.tree_util.keystr(path), g) for path, g in jax.tree_util.tree_leaves_with_path(made[2])]
    used = {name: [bool(e.any()) for e in g.reshape(8, -1)] for name, g in leaves if "experts" in name and "w_" in name}
    assert len(used) == 3 and all(each == [True, True, *[False] * 6] for each in used.values())
