"""Rows that products over all tokens dispatch to experts: which values they are, and which axis they have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import auto_shard, plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.program.tracing import trace

TOKENS, WIDTH, HIDDEN, EXPERTS, PLACES = 32, 8, 16, 4, 12
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def loss(params, x):
    gates = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = (jnp.cumsum(chosen, axis=0) - 1) * chosen
    slots = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), PLACES)
    sent = jnp.einsum("tec,td->ecd", slots, x)
    made = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", sent, params["up"])), params["down"])
    combine = slots * gates[..., None]
    return jnp.mean((jnp.einsum("tec,ecd->td", combine, made) - x) ** 2)


def step(state, x):
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, x)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), value


def twice(state, x):
    """A second step on the updated parameters, in the same function."""
    state, _ = step(state, x)
    return step(state, x)


def values():
    made = params()
    return (made, OPTIMIZER.init(made)), jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))


def roles_of(fn):
    state, x = jax.eval_shape(values)
    analysis = analyse(trace(fn, (state, x), {}))
    return analysis.axes, analysis.roles


@pytest.mark.parametrize("fn", [step, twice])
def test_rows_of_experts_are_dispatched_and_gradients_are_not(fn):
    axes, roles = roles_of(fn)
    shapes = {axes.program.avals[v].shape for v in roles.dispatched}
    assert shapes == {(EXPERTS, PLACES, WIDTH), (EXPERTS, PLACES, HIDDEN)}
    assert {axes.sizes[c] for c in roles.dispatched_rows} == {PLACES}
    assert [axes.sizes[c] for c in roles.experts] == [EXPERTS]
    assert not roles.dispatched & roles.gradients


def test_a_program_without_experts_dispatches_nothing():
    def dense(state, x):
        params, moments = state
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"][0]) @ p["down"][0] - x) ** 2))(
            params
        )
        updates, moments = OPTIMIZER.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), value

    _, roles = roles_of(dense)
    assert (roles.dispatched, roles.dispatched_rows, roles.experts) == (frozenset(), (), ())


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("words", ["ep:4 dp:2", "dp:8", pytest.param("fsdp:2 ep:2 tp:2", marks=pytest.mark.slow)])
def test_dispatched_rows_are_sharded_and_equal_one_device(words):
    state, x = values()
    want, got = step(state, x), auto_shard(lambda state, x: step(state, x), plan=words)(state, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7)


def test_what_shards_the_batch_shards_dispatched_rows():
    made = plan(step, *jax.eval_shape(values), target="cpu:8", plan="dp:8")
    assert made.alone is not None
    assert 2.2 * made.estimate.compute_us < made.alone.compute_us  # 1.7 if each device computes the rows of all


def test_ep_shards_experts_of_dispatched_rows():
    made = plan(step, *jax.eval_shape(values), target="cpu:8", plan="dp:2 ep:4")
    (up,) = [leaf for leaf in made.inputs if leaf.path.endswith("up") and leaf.role == "parameter"]
    assert up.axes[0] == "experts" and up.spec[0] == "ep"
    (router,) = [leaf for leaf in made.inputs if leaf.path.endswith("router") and leaf.role == "parameter"]
    assert router.axes[1] == "router" and router.spec[1] == "ep"


def test_masks_of_dispatched_rows_go_with_the_experts():
    """So tokens are gathered and sums of tokens are reduced. Otherwise it would be the rows of all experts."""
    shapes = jax.eval_shape(values)
    made = plan(step, *shapes, target="cpu:8", plan="ep:4 dp:2")
    with_tokens = plan(step, *shapes, target="cpu:8", plan="ep:4 dp:2 ep-router")
    assert made.estimate.comm_bytes < 0.8 * with_tokens.estimate.comm_bytes


def test_a_router_without_dispatched_rows_is_not_sharded():
    """Groups of tokens are dispatched apart, so that masks stay with their group."""

    def grouped(state, x):
        def total(params):
            return jax.vmap(lambda rows: loss(params, rows))(x.reshape(8, -1, WIDTH)).sum()

        value, gradients = jax.value_and_grad(total)(state[0])
        return jax.tree.map(lambda w, g: w - 0.1 * g, state[0], gradients), value

    (params, _), x = jax.eval_shape(values)
    analysis = analyse(trace(grouped, ((params, None), x), {}))
    assert analysis.roles.experts and not analysis.roles.routers
