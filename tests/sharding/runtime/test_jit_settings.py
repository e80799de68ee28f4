"""`auto_shard(jax.jit(f, ...))` keeps the donated and static arguments of the `jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from tests.sharding.programs import assert_close

X, W = jnp.ones((16, 8)), jnp.ones((8, 4))


def test_the_settings_of_a_jit_are_kept() -> None:
    def decayed(w: jax.Array, x: jax.Array, *, power: int) -> Any:
        return w - 0.1 * jnp.mean(x) * w**power, jnp.sum(x)

    step = autoshard.auto_shard(jax.jit(decayed, donate_argnames="w", static_argnames="power"), plan="dp:8")
    w = W + 0
    new, _ = step(w, X, power=2)
    assert_close(decayed(W, X, power=2)[0], new)
    placed = step(new, X, power=3)[0]
    assert new.is_deleted() and not placed.is_deleted()
    numbered = autoshard.auto_shard(jax.jit(lambda x, n: x * n if n > 1 else x, static_argnums=1), plan="dp:8")
    assert_close(X * 3, numbered(X, 3))


def scaled(w: jax.Array, x: jax.Array, n: int) -> Any:
    return w * n - jnp.mean(x), jnp.sum(x)


class Trainer:
    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def step(self, w: jax.Array, x: jax.Array, n: int) -> Any:
        return scaled(w, x, n)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jax.jit(scaled, static_argnums=-1, donate_argnums=-3), (2,)),
        (Trainer().step, (2,)),
        (functools.partial(jax.jit(lambda n, w, x: scaled(w, x, n), static_argnums=0, donate_argnums=1), 2), ()),
        (functools.partial(jax.jit(scaled, static_argnums=2, donate_argnums=0), n=2), ()),
    ],
    ids=["negative", "method", "partial", "keyword of a partial"],
)
def test_settings_are_those_of_the_arguments_that_are_left(fn: Callable[..., Any], args: tuple[int, ...]) -> None:
    step = autoshard.auto_shard(fn, plan="dp:8")
    placed, _ = step(W + 0, X, *args)
    assert_close(scaled(scaled(W, X, 2)[0], X, 2), step(placed, X, *args))
    assert placed.is_deleted() and not X.is_deleted()
