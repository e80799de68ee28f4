"""Compares the mixture-of-experts layers with a reference that runs every expert on every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.spmdrules.catalogue import moe as module
from autoshard.spmdrules.propagation.propagate import propagate
from tests.arrays import array
from tests.spmdrules.catalogue.compiled import compiled

moe = compiled(module)
pytestmark = pytest.mark.usefixtures("strict_numerics")
RNG = np.random.default_rng(0)
X = array(RNG.normal(size=(4, 8, 12)), jnp.float32)
ROUTER = array(RNG.normal(size=(12, 4)), jnp.float32)
GATE, UP, DOWN = (array(RNG.normal(size=s) * 0.3, jnp.float32) for s in ((4, 12, 16), (4, 12, 16), (4, 16, 12)))


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


def every_expert(x):
    hidden = jax.nn.silu(jnp.einsum("gtm,emf->gtef", x, GATE)) * jnp.einsum("gtm,emf->gtef", x, UP)
    return jnp.einsum("gtef,efm->gtem", hidden, DOWN)


def mixed(x, weights, chosen):
    return jnp.einsum("gtk,gtke,gtem->gtm", weights, jax.nn.one_hot(chosen, 4), every_expert(x))


def test_nothing_is_dropped_with_enough_capacity():
    weights, chosen, *_ = moe.top_k_gate(X, ROUTER)
    actual, _ = jax.jit(functools.partial(moe.moe_layer, capacity=8))(X, ROUTER, GATE, UP, DOWN)
    assert_close(actual, jax.jit(mixed)(X, weights, chosen))


def test_dropless_moe_equals_the_reference_with_its_gradients():
    weights, chosen, *_ = moe.top_k_gate(X, ROUTER)
    flat = [a.reshape(32, -1) for a in (weights, chosen)]

    def dropless(x, gates):
        return moe.dropless_moe(x.reshape(32, 12), gates.reshape(32, 2), flat[1], GATE, UP, DOWN).reshape(X.shape)

    def with_gradients(fn):
        value, pull = jax.vjp(fn, X, weights)
        return value, pull(X)

    runs = [jax.jit(with_gradients, static_argnums=0)(fn) for fn in (dropless, lambda x, y: mixed(x, y, chosen))]
    assert_close(runs[0][0], runs[1][0])
    assert_close(runs[0][1], runs[1][1], 1e-4)


def test_choices_past_the_capacity_are_dropped_first_choices_first():
    chosen = jnp.asarray([[[0, 1], [0, 1], [1, 0]]], jnp.int32)
    weights = jnp.asarray([[[0.6, 0.4], [0.7, 0.3], [0.8, 0.2]]])
    dispatch, combine = moe.capacity_masks(weights, chosen, experts=2, capacity=2)
    # Expert 0 gets tokens 0 and 1. Expert 1 gets token 2 (its first choice), then token 0. Token 1 is dropped there.
    expected = np.zeros((1, 3, 2, 2), np.float32)
    for token, expert, slot, weight in ((0, 0, 0, 0.6), (1, 0, 1, 0.7), (2, 1, 0, 0.8), (0, 1, 1, 0.4)):
        expected[0, token, expert, slot] = weight
    assert_close(combine, expected)
    assert_close(dispatch, (expected > 0).astype(np.float32))


def test_losses_of_the_gate():
    even = jnp.full((1, 8, 4), 0.25)
    assert_close(moe.load_balancing_loss(even, (jnp.arange(8, dtype=jnp.int32) % 4).reshape(1, 8, 1)), [1.0])
    certain = jax.nn.one_hot(jnp.zeros((1, 8), jnp.int32), 4)
    assert_close(moe.load_balancing_loss(certain, jnp.zeros((1, 8, 1), jnp.int32)), [4.0])
    assert_close(moe.router_z_loss(jnp.zeros((1, 8, 4))), [np.log(4.0) ** 2])


def test_gates_are_float32_and_choose_the_largest():
    weights, chosen, *_ = moe.top_k_gate(X.astype(jnp.bfloat16), ROUTER.astype(jnp.bfloat16))
    assert weights.dtype == jnp.float32
    assert_close(weights.sum(-1), jnp.ones((4, 8)))
    first = moe.switch_gate(X, ROUTER)
    assert_close(first[1], moe.top_k_gate(X, ROUTER)[1][..., :1])
    bias = jnp.asarray([0.0, 0, 9, 0])
    weights, chosen = moe.sigmoid_gate(X, ROUTER, bias)
    assert (chosen[..., 0] == 2).all()  # the bias affects the choice but not the weights
    scores = jax.nn.sigmoid(jnp.einsum("gtm,me->gte", X, ROUTER))
    selected = jnp.take_along_axis(scores, chosen, -1)
    assert_close(weights, selected / selected.sum(-1, keepdims=True))


def test_an_expert_without_tokens_has_gradients_of_zero():
    chosen = jnp.zeros((32, 2), jnp.int32).at[:, 1].set(2)
    weights = jnp.full((32, 2), 0.5)
    run = lambda *w: moe.dropless_moe(X.reshape(32, 12), weights, chosen, *w).sum()  # noqa: E731
    for gradient in jax.grad(run, (0, 1, 2))(GATE, UP, DOWN):
        assert not gradient[1].any() and not gradient[3].any() and gradient[0].any()


def test_sharded_groups_and_sharded_experts_move_nothing():
    weights = (GATE, UP, DOWN)
    propagation = propagate(moe.moe_layer, X, ROUTER, *weights, in_specs=(P("dp"), *(P(),) * 4), mesh={"dp": 4})
    assert not propagation.reshards and propagation.out_specs == (P("dp"), P("dp"))
    slots = jnp.zeros((4, 4, 8, 12))
    propagation = propagate(moe.expert_feed_forward, slots, *weights, in_specs=P("ep"), mesh={"ep": 4})
    assert not propagation.reshards and propagation.out_specs == P("ep")
