"""Compare the dispatch time of `auto_shard` with that of `jax.jit` and `nnx.jit`.

    python benchmarks/dispatch.py

Both sides run the same function on 200 leaves with the same shardings. A call is timed until it returns. The devices
finish outside of the timing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Row, measured, report
from flax import nnx

from autoshard import auto_shard
from autoshard.train.program.step_timing import paired_times

LEAVES, ROUNDS, CALLS = 200, 200, 5
PLACES = {
    "1 device": {"mesh": jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])},
    "8 devices": {"mesh": {"data": 8}},
}


class Many(nnx.Module):
    """A model of 200 small parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(LEAVES // 2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + sum(jnp.sum(layer.kernel[...]) + jnp.sum(bias_of(layer)[...]) for layer in self.layers)


def bias_of(layer: nnx.Linear) -> nnx.Param:
    """The bias of a layer that has one."""
    assert layer.bias is not None
    return layer.bias


def bump(state: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """The cheapest step that touches every leaf."""
    return {name: leaf + jnp.mean(x) for name, leaf in state.items()}


def bump_model(model: Many, x: jax.Array) -> jax.Array:
    """A cheap step that updates an nnx model in place."""
    for layer in model.layers:
        bias_of(layer)[...] += jnp.mean(x)
    return jnp.mean(x)


def timer(call: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that measures the seconds of a call until it returns. The devices finish between calls."""

    def once() -> float:
        spent = 0.0
        for _ in range(CALLS):
            begin = time.perf_counter()
            result = call()
            spent += time.perf_counter() - begin
            jax.block_until_ready(result)
        return spent / CALLS

    return once


def donating(step: Callable[..., Any], state: Any, x: jax.Array) -> Callable[[], Any]:
    """Return a call that donates the state which the call before returned, as a train step does."""

    def call() -> Any:
        nonlocal state
        state = step(state, x)
        return state

    return call


def dict_rows(place: str, donated: bool = False, **options: Any) -> list[Row]:
    """Compare `auto_shard` with `jax.jit` on a dict."""
    donate = (0,) if donated else ()
    step = auto_shard(bump, donate_argnums=donate, **options)
    state, x = {f"w{i}": jnp.full((8, 4), i, jnp.float32) for i in range(LEAVES)}, jnp.ones((8, 4))
    state = step(state, x)
    x = jax.device_put(x, jax.tree.leaves(input_shardings(step, state, x))[-1])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state, x))
    plain = jax.jit(bump, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=donate)
    if donated:
        mine, yours = donating(step, jax.tree.map(jnp.copy, state), x), donating(plain, state, x)
    else:
        mine, yours = lambda: step(state, x), lambda: plain(state, x)
    ours, theirs = paired_times(timer(mine), timer(yours), rounds=ROUNDS)
    name = f"{'donated ' * donated}dict of {LEAVES} leaves, {place}"
    return [
        measured(f"{name}: jax.jit", 1e6 * theirs, "us"),
        measured(f"{name}: auto_shard - jax.jit", 1e6 * (ours - theirs), "us", 50),
    ]


def input_shardings(step: Any, *args: Any) -> Any:
    """Return the shardings of the planned function's arguments."""
    return step.lower(*args).compile().input_shardings[0]


def nnx_rows(place: str, **options: Any) -> list[Row]:
    """Compare `auto_shard` with `nnx.jit` on a module."""
    x = jnp.ones((8, 4))
    mine, yours = Many(nnx.Rngs(0)), Many(nnx.Rngs(0))
    step, plain = auto_shard(bump_model, **options), nnx.jit(bump_model)
    step(mine, x)
    # Both have the same arrays with the same shardings.
    nnx.update(yours, jax.tree.map(lambda leaf: leaf, nnx.state(mine)))
    ours, theirs = paired_times(timer(lambda: step(mine, x)), timer(lambda: plain(yours, x)), rounds=ROUNDS)
    np.testing.assert_allclose(bias_of(mine.layers[0])[...], bias_of(yours.layers[0])[...], rtol=1e-6)
    name = f"nnx model of {LEAVES} leaves, {place}"
    return [
        measured(f"{name}: nnx.jit", 1e6 * theirs, "us"),
        measured(f"{name}: auto_shard / nnx.jit - 1", 100 * (ours / theirs - 1), "%", 10),
    ]


def main() -> None:
    """Measure and report."""
    makers = (dict_rows, functools.partial(dict_rows, donated=True), nnx_rows)
    rows = [row for place, options in PLACES.items() for make in makers for row in make(place, **options)]
    report("dispatch", rows, leaves=LEAVES, rounds=ROUNDS, calls=CALLS, devices=jax.device_count())


if __name__ == "__main__":
    main()
