"""Donated state that changes from host to device memory is named in a warning."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from autoshard import auto_shard
from autoshard.errors import AutoshardWarning

X, W = jnp.ones((16, 8)), jnp.ones((8, 8))
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def state() -> dict[str, jax.Array]:
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {"w": W + 0, "m": jax.device_put(W, place), "n": jax.device_put(W, place)}


def step(state: dict[str, jax.Array], x: jax.Array, back: Any = DEVICE) -> dict[str, jax.Array]:
    m, n = (jax.device_put(state[k], DEVICE) + jnp.mean(x) for k in "mn")
    return {"w": state["w"] - m, "m": jax.device_put(m, back), "n": jax.device_put(n, HOST)}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_state_that_stays_on_the_device_is_named() -> None:
    donating = auto_shard(step, plan="dp:8", donate_argnums=0)
    with pytest.warns(AutoshardWarning) as caught:
        returned = donating(state(), X)
    (text,) = (str(w.message) for w in caught if issubclass(w.category, AutoshardWarning))
    assert re.search(r"step\): donated state 'state/m' enters in host memory and is returned in device memory", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoshardWarning)
        for _ in range(2):  # the state is on the device now
            returned = donating(returned, X)
        auto_shard(step, plan="dp:8")(state(), X)
        auto_shard(lambda s, x: step(s, x, HOST), plan="dp:8", donate_argnums=0)(state(), X)
    assert float(returned["m"][0, 0]) == 4.0
