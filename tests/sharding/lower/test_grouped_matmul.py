"""Dropless experts (grouped matrix products) on shards of tokens, experts and features."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard

EXPERTS, CHOICES, EMBED, FFN, VOCAB = 8, 2, 64, 48, 64


def normal(seed, *shape):
    return 0.2 * jax.random.normal(jax.random.key(seed), shape)


def parameters():
    experts = {"gate": normal(0, 2, EXPERTS, EMBED, FFN), "up": normal(1, 2, EXPERTS, EMBED, FFN)}
    experts["down"] = normal(2, 2, EXPERTS, FFN, EMBED)
    router = normal(3, 2, EMBED, EXPERTS).at[:, :, 5].set(-9.0)  # no token chooses expert 5, because x stays positive
    return {"embed": jnp.abs(normal(4, VOCAB, EMBED)), "head": normal(5, EMBED, VOCAB), "router": router} | experts


def experts_of(x, layer):
    """Sort the choices of tokens `[tokens, embed]` by expert, run each expert on its rows, and add up the results."""
    weights, chosen = lax.top_k(jax.nn.softmax(jnp.abs(x) @ layer["router"]), CHOICES)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.sum(jax.nn.one_hot(chosen.reshape(-1), EXPERTS, dtype=jnp.int32), 0)
    rows = x[order // CHOICES]
    hidden = jax.nn.silu(lax.ragged_dot(rows, layer["gate"], sizes)) * lax.ragged_dot(rows, layer["up"], sizes)
    results = lax.ragged_dot(hidden, layer["down"], sizes)
    by_choice = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
    return jnp.sum(by_choice.reshape(-1, CHOICES, EMBED) * weights[..., None], 1)


def loss_fn(params, tokens):
    def block(x, layer):
        return x + experts_of(x.reshape(-1, EMBED), layer).reshape(x.shape), None

    x = params["embed"][tokens[:, :-1]]
    x, _ = lax.scan(block, x, {k: params[k] for k in ("router", "gate", "up", "down")})
    losses = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(losses, tokens[:, 1:, None], -1))


def train_step(params, tokens):
    loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(9), (8, 9), 0, VOCAB)


@pytest.fixture(scope="module")
def expected(tokens):
    return jax.jit(train_step)(parameters(), tokens)


QUICK = "fsdp:2 ep:2 tp:2"
PLANS = ["ep:8", "dp:2 ep:4", "fsdp:2 ep:2 tp:2", "dp:8", None]


@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[] if p == QUICK else pytest.mark.slow, id=p or "chosen") for p in PLANS]
)
def test_a_train_step_equals_one_device(plan, tokens, expected):
    step = autoshard.auto_shard(train_step, plan=plan)
    updated = step(parameters(), tokens)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(updated), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    idle = {name: np.asarray(updated[0][name] - parameters()[name])[:, 5] for name in ("gate", "up", "down")}
    assert all(not moved.any() for moved in idle.values())  # no token: the gradient is exactly zero


def test_expert_parallel_shards_keep_their_experts(tokens):
    plan = autoshard.auto_shard(train_step, plan="ep:8").plan(parameters(), tokens)
    of_experts = [leaf for leaf in plan.inputs if len(leaf.shape) == 4]
    assert len(of_experts) == 3
    assert all(leaf.axes[1] == "experts" and leaf.spec[1] == "ep" for leaf in of_experts)
    text = plan.jit().lower(parameters(), tokens).compile().as_text() or ""
    assert re.findall(r"= .* all-reduce(?:-start)?\(", text)
    gathered = re.findall(r"= \w+\[([\d,]*)\].* all-gather(?:-start)?\(", text)
    assert not [shape for shape in gathered if shape.endswith((f"{EMBED},{FFN}", f"{FFN},{EMBED}"))]
    # Tokens are gathered for the experts and results are reduce-scattered: `ep` shards the batch elsewhere.
    assert {move[0] for move in plan.traffic} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_all_weights_of_one_dispatch_share_the_experts_axis(tokens):
    plan = autoshard.plan(train_step, parameters(), tokens, target="cpu:1")
    assert {leaf.axes[1] for leaf in plan.inputs if len(leaf.shape) == 4} == {"experts"}
