"""Donated arrays that occur twice, or share memory, are copied before the call: JAX would end the process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autoshard
from autoshard.sharding.program.donated_arrays import without_repeated, without_shared_memory
from tests.sharding.programs import assert_close

X, W = jnp.ones((16, 8)), jnp.ones((8, 4))


def averaged_step(state: Any, x: jax.Array) -> Any:
    grads = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(state["params"])
    params = state["params"] - 0.1 * grads
    return {"params": params, "ema": 0.9 * state["ema"] + 0.1 * params}


@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
def test_an_array_that_occurs_twice_can_be_donated(words: str) -> None:
    want = averaged_step({"params": W, "ema": W}, X)
    step = autoshard.auto_shard(averaged_step, plan=words, donate_argnums=0)
    w = W + 0
    state = step({"params": w, "ema": w}, X)
    assert_close(want, state)
    want = averaged_step({"params": want["params"], "ema": want["params"]}, X)
    assert_close(want, step({"params": state["params"], "ema": state["params"]}, X))


def test_a_donated_array_can_be_another_argument() -> None:
    def distance(w: jax.Array, target: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jnp.mean(x) * (w - target / 2), jnp.sum((w - target) ** 2)

    step = autoshard.auto_shard(distance, plan="dp:8", donate_argnums=0)
    w = W + 0
    assert_close(distance(W, W, X), step(w, w, X))
    w = step(W + 0, W, X)[0]
    assert_close(distance(w + 0, w + 0, X), step(w, w, X))


def everywhere() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec())


def test_donated_arrays_may_share_memory() -> None:
    step = autoshard.auto_shard(averaged_step, plan="dp:8", donate_argnums=0)
    want = averaged_step({"params": W, "ema": W}, X)
    w = W + 0  # on one device, and `place` moves it there
    shared = jax.device_put(w, everywhere())
    assert_close(want, step({"params": w, "ema": shared}, X))
    jitted = autoshard.plan(averaged_step, {"params": W, "ema": W}, X, plan="dp:8", donate_argnums=0).jit()
    w = W + 0
    assert_close(want, jitted({"params": w, "ema": jax.device_put(w, everywhere())}, X))
    w = W + 0
    state = jitted({"params": w, "ema": w}, X)  # a later call
    assert_close(want, state)


def test_copies_are_placed_as_their_originals() -> None:
    w = W + 0
    copied = without_repeated([w, w], {0, 1})
    assert copied is not None and copied[0] is w and copied[1] is not w
    assert not copied[1].committed and copied[1].sharding == w.sharding
    placed = jax.device_put(w, everywhere())
    key = jax.random.key(0)
    leaves = [placed, w, key, X, key, 3, 3, np.ones(3)]
    copied = without_shared_memory(leaves, {0, 1, 2, 4, 5, 7})
    assert [i for i, (a, b) in enumerate(zip(leaves, copied, strict=True)) if a is not b] == [1, 4]
    copied = without_shared_memory(leaves, {0})
    assert [i for i, (a, b) in enumerate(zip(leaves, copied, strict=True)) if a is not b] == [0]
    assert copied[0].committed and copied[0].sharding == placed.sharding


def test_arrays_that_are_not_donated_are_not_copied() -> None:
    assert without_repeated([W, X, 1], {0}) is None
    repeated = without_repeated([X, W, X], {1})
    assert repeated is not None and repeated[0] is X and repeated[2] is X
