"""Loops that use the same weights in every iteration have the loss and the gradients of one device."""

import functools

import jax
import pytest

from autoshard import auto_shard
from tests.parity.recurrent import LOSSES, arguments, step_of
from tests.sharding.programs import assert_close

PLANS = ["fsdp:8", "dp:2 fsdp:4", "zero1:8", "fsdp:4 tp:2", "tp:8"]


def state_and_batch(name):
    weights, x = arguments(name)
    return (weights, jax.tree.map(lambda w: 0 * w, weights)), x


@functools.cache
def single(name):
    return jax.device_get(jax.jit(step_of(name))(*state_and_batch(name)))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("words", PLANS)
def test_losses_and_gradients_equal_one_device(name, words):
    step = auto_shard(step_of(name), plan=words)
    traced = step.plan(*state_and_batch(name)).bound.problem.traced
    assert "gather_before_loop" in str(traced.closed) and "reduce_after_loop" in str(traced.closed)
    assert_close(single(name), jax.device_get(step(*state_and_batch(name))))
