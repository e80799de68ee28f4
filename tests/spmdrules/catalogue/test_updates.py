"""Compares parameter updates with Optax on a pytree, and with formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.spmdrules.catalogue import updates
from autoshard.spmdrules.propagation.propagate import propagate
from tests.arrays import array

pytestmark = pytest.mark.whole

RNG = np.random.default_rng(0)
PARAMETER, GRADIENT = (array(RNG.normal(size=(8, 12)), jnp.float32) for _ in range(2))
OTHER = array(RNG.normal(size=(16, 20)), jnp.float32)


def assert_close(a, b, tolerance=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.adafactor(0.1, min_dim_size_to_factor=4)])
def test_a_flat_state_gives_the_same_steps_as_a_tree(optimizer):
    params: Any = {"w": PARAMETER}
    state = optimizer.init(params)
    flat = (PARAMETER, *jax.tree.leaves(optimizer.init(PARAMETER)))
    for scale in (1.0, -2.0, 0.5):
        actual, state = optimizer.update({"w": scale * GRADIENT}, state, params)
        params = optax.apply_updates(params, actual)
        flat = updates.step_of(optimizer)(flat[0], scale * GRADIENT, *flat[1:])
    assert_close(flat, (params["w"], *jax.tree.leaves(state)))


def test_the_first_step_of_adamw_equals_its_formula():
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    actual = updates.step_of(optimizer)(PARAMETER, GRADIENT, *jax.tree.leaves(optimizer.init(PARAMETER)))[0]
    assert_close(actual, PARAMETER - 1e-2 * (GRADIENT / (jnp.abs(GRADIENT) + 1e-8) + 0.1 * PARAMETER))


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_by_norms_equals_optax(max_norm):
    clip = optax.clip_by_global_norm(max_norm)
    tree = {"a": GRADIENT, "b": OTHER}
    expected: Any = clip.update(tree, clip.init(tree))[0]
    assert_close(updates.clip_by_global_norm(GRADIENT, OTHER, max_norm=max_norm), (expected["a"], expected["b"]))
    assert_close(updates.clip_by_leaf_norm(GRADIENT, max_norm=max_norm), clip.update(GRADIENT, clip.init(GRADIENT))[0])


def test_the_norm_of_bfloat16_leaves_is_float32_and_zeros_stay_zero():
    many = jnp.full((300, 300), 0.01, jnp.bfloat16)
    exact = np.sqrt(90000.0) * float(jnp.bfloat16(0.01))
    np.testing.assert_allclose(updates.global_norm(many), exact, rtol=1e-5)
    zeros = jnp.zeros((4, 4))
    assert np.array_equal(updates.clip_by_leaf_norm(zeros), zeros)


def test_averages_equal_optax():
    assert_close(updates.ema(PARAMETER, OTHER[:8, :12]), optax.incremental_update(OTHER[:8, :12], PARAMETER, 1e-3))
    average = optax.ema(0.9, debias=True)
    state = average.init(PARAMETER)
    ours, count = jnp.zeros_like(PARAMETER), jnp.int32(0)
    for value in (PARAMETER, GRADIENT):
        expected, state = average.update(value, state)
        actual, ours, count = updates.debiased_ema(ours, value, count)
        assert_close(actual, expected)


def test_accumulated_gradients_give_their_mean_and_are_reset():
    total, count = jnp.zeros((8, 12)), jnp.int32(0)
    parts = array(RNG.normal(size=(8, 8, 12)), jnp.float32)
    means = []
    for part in parts:
        mean, total, count = updates.gradient_accumulation(total, part, count)
        means.append(mean)
    assert_close(means[3], parts[:4].mean(0), 1e-5)
    assert_close(means[7], parts[4:].mean(0), 1e-5)
    assert not np.any(means[2]) and not np.any(total) and count == 0


def test_the_loss_scale_halves_on_overflow_and_doubles_with_patience():
    scale, steps = jnp.float32(8.0), jnp.int32(0)
    unscaled, scale, steps = updates.loss_scaling(GRADIENT, scale, steps, patience=2)
    assert_close(unscaled, GRADIENT / 8)
    assert (scale, steps) == (8, 1)
    _, scale, steps = updates.loss_scaling(GRADIENT, scale, steps, patience=2)
    assert (scale, steps) == (16, 0)
    unscaled, scale, steps = updates.loss_scaling(GRADIENT.at[0, 0].set(jnp.inf), scale, steps, patience=2)
    assert not np.any(unscaled) and (scale, steps) == (8, 0)


def test_orthogonalized_singular_values_are_near_one():
    values = np.linalg.svd(updates.orthogonalize(GRADIENT))[1]
    assert values.min() > 0.6 and values.max() < 1.3
    assert_close(updates.weight_decay(PARAMETER, GRADIENT), GRADIENT + 0.1 * PARAMETER)


def test_a_sharded_step_moves_no_parameters():
    operator = next(op for op in updates.OPERATORS if op.name == "adamw")
    specs = tuple(P("data") if x.shape else P() for x in operator.args)
    propagation = propagate(operator.fn, *operator.args, in_specs=specs, mesh={"data": 4})
    assert not propagation.reshards and propagation.out_specs[0] == P("data")
    propagation = propagate(updates.clip_by_global_norm, GRADIENT, OTHER, in_specs=P("data"), mesh={"data": 4})
    assert propagation.out_specs == (P("data"), P("data"))
    assert sum(r.bytes_moved for r in propagation.reshards) <= 2 * 6  # at most one number per leaf
