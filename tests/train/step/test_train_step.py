"""One train step: its gradient, its microbatches and its dropout masks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autoshard
from autoshard.models import GPT, GPTConfig, cross_entropy
from autoshard.train.step.ema import EmaConfig
from autoshard.train.step.train_state import Program, make_program
from autoshard.train.step.train_step import make_eval_step, make_train_step

SHAPE: dict[str, Any] = dict(vocab=32, layers=2, heads=2, width=8, context=8)
SGD = optax.sgd(1.0)
RATE = optax.constant_schedule(1.0)


def gpt(**shape: Any) -> Program:
    config = GPTConfig(**{**SHAPE, **shape})
    return make_program(lambda rngs: GPT(config, rngs=rngs), SGD)


def batch() -> dict[str, jax.Array]:
    """A batch of eight rows in which some tokens are masked."""
    random = np.random.default_rng(0)
    tokens, mask = random.integers(0, 32, (8, 9)), random.integers(0, 2, (8, 8))
    mask[3] = 0
    return {
        "inputs": jnp.asarray(tokens[:, :-1], jnp.int32),
        "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
        "mask": jnp.asarray(mask, jnp.float32),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2, 8])
def test_the_gradient_is_that_of_the_token_weighted_mean(microbatches: int) -> None:
    program = gpt()
    state = jax.jit(program.create_state)(jax.random.key(0))

    def mean_loss(params: Any) -> jax.Array:
        model = program.model(params, state.frozen, state.variables, None)
        total, weight = cross_entropy(model(batch()["inputs"]), batch()["targets"], batch()["mask"])
        return total / weight

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    after, metrics = jax.jit(make_train_step(program, RATE, microbatches))(state, batch())
    update = jax.tree.map(jnp.subtract, state.params, after.params)  # SGD with learning rate 1
    error = optax.tree.norm(jax.tree.map(jnp.subtract, update, gradient))
    assert error < 1e-5 * optax.tree.norm(gradient)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    assert metrics["weight"] == batch()["mask"].sum() and int(after.step) == 1


def test_microbatches_keep_the_numerics_strict(strict_numerics: None) -> None:
    """Our part of the step, and that of SGD, promotes no dtype and no rank implicitly."""
    program = gpt()
    jax.eval_shape(make_train_step(program, RATE, 2), program.abstract_state(), batch())


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_dropout_is_the_same_on_every_mesh_and_differs_between_steps(
    microbatches: int, mesh_of: Callable[..., Mesh]
) -> None:
    program = gpt(dropout=0.3)
    state = jax.jit(program.create_state)(jax.random.key(0))
    step = make_train_step(program, RATE, microbatches)
    one_device_loss = jax.jit(step)(state, batch())[1]["loss"]
    spread = NamedSharding(mesh_of(data=4, model=2), PartitionSpec("data", "model"))
    sharded = jax.jit(step)(state, jax.device_put(batch(), spread))[1]["loss"]
    np.testing.assert_allclose(sharded, one_device_loss, rtol=1e-5)
    later = jax.jit(step)(replace(state, step=state.step + 1), batch())[1]["loss"]
    plain = jax.jit(make_train_step(gpt(), RATE, microbatches))(state, batch())[1]["loss"]
    assert len({float(one_device_loss), float(later), float(plain)}) == 3


@pytest.mark.slow
def test_evaluation_has_no_dropout() -> None:
    program = gpt(dropout=0.3)
    state = jax.jit(program.create_state)(jax.random.key(0))
    parts = state.params, state.frozen, state.variables
    for one, other in zip(*(jax.jit(make_eval_step(p))(*parts, batch()) for p in (program, gpt())), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("chunks", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_evaluation_in_chunks_of_the_vocabulary_has_the_same_loss(chunks: int) -> None:
    whole, in_chunks = gpt(), gpt(loss_chunks=chunks)
    state = jax.jit(whole.create_state)(jax.random.key(0))
    parts = state.params, state.frozen, state.variables
    for one, other in zip(*(jax.jit(make_eval_step(p))(*parts, batch()) for p in (whole, in_chunks)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_reported_learning_rate_is_the_one_used() -> None:
    rate = optax.linear_schedule(1.0, 0.0, 10)
    program = make_program(lambda rngs: GPT(GPTConfig(**SHAPE), rngs=rngs), optax.sgd(rate))
    step, state = jax.jit(make_train_step(program, rate)), jax.jit(program.create_state)(jax.random.key(0))
    for expected in (1.0, 0.9, 0.8):
        after, metrics = step(state, batch())
        update_norm = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, after.params))
        np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-6)
        np.testing.assert_allclose(update_norm, expected * metrics["grad_norm"], rtol=1e-4)
        state = after


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [None, "fsdp:8"])
def test_the_average_is_that_of_the_stored_parameters(plan: str | None, dtype: str) -> None:
    config = GPTConfig(**SHAPE, param_dtype=dtype)
    program = make_program(lambda rngs: GPT(config, rngs=rngs), optax.adam(1e-2), ema=EmaConfig(0.5))
    step = make_train_step(program, RATE)
    planned = autoshard.auto_shard(step, plan=plan) if plan else jax.jit(step)
    after = planned(jax.jit(program.create_state)(jax.random.key(0)), batch())[0]
    assert after.ema.weight == 0.5  # so the products are exact
    for mean, stored in zip(jax.tree.leaves(after.ema.mean), jax.tree.leaves(after.params), strict=True):
        assert stored.dtype == dtype and mean.dtype == jnp.float32
        np.testing.assert_array_equal(mean / after.ema.weight, np.asarray(stored, np.float32))


@pytest.mark.slow
def test_each_microbatch_has_its_own_dropout() -> None:
    """Two microbatches of the same rows have the same loss as one of them without dropout, but not with dropout."""
    half = jax.tree.map(lambda rows: rows[:4], batch())
    twice = jax.tree.map(lambda rows: jnp.repeat(rows, 2, axis=0), half)  # row i goes to microbatch i % 2
    for dropout, same in ((0.0, True), (0.3, False)):
        program = gpt(dropout=dropout)
        state = jax.jit(program.create_state)(jax.random.key(0))
        one = jax.jit(make_train_step(program, RATE))(state, half)[1]["loss"]
        two = jax.jit(make_train_step(program, RATE, 2))(state, twice)[1]["loss"]
        assert np.isclose(one, two, rtol=1e-6) == same
