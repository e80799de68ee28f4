"""Which state is the optimizer's, and how its update runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import _compat, auto_shard, plan
from autoshard.sharding.offload.optimizer_state import optimizer_state, update_order
from autoshard.sharding.offload.rewriting import Offloader
from autoshard.sharding.offload.update_loops import UpdateLoop
from autoshard.sharding.program.tracing import trace
from tests.sharding.offload.steps import arguments, loss_of, parameters, rows, step_of


def offloaded_paths(step: Any, *args: Any) -> set[str]:
    traced = trace(step, args, {})
    offloader = Offloader(traced)
    return {traced.in_paths[i] for i, _ in optimizer_state(offloader.closed, traced.state)}


def test_moments_are_the_optimizers_state() -> None:
    found = offloaded_paths(step_of("scan"), *arguments())
    assert found == {f"1/0/{moment}/{name}" for moment in ("mu", "nu") for name in ("up", "down")}  # biases are small


def test_averages_are_the_optimizers_state_and_values_that_the_loss_reads_are_not() -> None:
    def step(params: Any, average: Any, offset: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: loss_of("scan")(jax.tree.map(jnp.add, p, offset), x))(params)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        average = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, params)
        return params, average, jax.tree.map(lambda o: o * 0.5, offset)

    params = parameters()
    assert offloaded_paths(step, params, params, params, rows()) == {"1/up", "1/down"}


def test_an_update_of_layers_is_a_loop() -> None:
    made = plan(step_of("scan"), *arguments(), plan="fsdp:8", offload="optimizer")
    assert made.bound is not None
    put = [op for op in made.bound.traced.program.ops() if op.name == "device_put"]
    assert len(put) == 8 and all(op.trips == 3 for op in put)  # two moments of two parameters, in and out


def updates_of(step: Any, *args: Any) -> list[Any]:
    """The update of each stacked parameter: a loop, or an equation that takes moments outside of loops."""
    traced = trace(step, args, {})
    offloader = Offloader(traced)
    jaxpr, state = _compat.open_jaxpr(offloader.closed), offloader.optimizer_state
    moved = {jaxpr.invars[i] for i, _ in state}
    order = update_order(offloader.closed, state)
    assert {id(eqn) for eqn in jaxpr.eqns} == {
        id(eqn) for each in order for eqn in (each.eqns if isinstance(each, UpdateLoop) else [each])
    }
    return [each for each in order if isinstance(each, UpdateLoop) or moved & {*map(_hashable, each.invars)}]


def _hashable(atom: Any) -> Any:
    return None if isinstance(atom, _compat.Literal) else atom


@pytest.mark.parametrize("average", [False, True])
def test_what_follows_an_update_is_in_its_loop(average: bool) -> None:
    """A step that keeps the old state if the loss is not finite, and averages the parameters, moves all state once."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def step(params: Any, state: Any, mean: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of("scan"))(params, x)
        updates, new_state = optimizer.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        new_mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, mean, new)
        good = jnp.isfinite(value)
        after = jax.tree.map(lambda a, b: jnp.where(good, a, b), (new, new_state, new_mean), (params, state, mean))
        return (*after, value) if average else (*after[:2], mean, value)

    params = parameters()
    found = updates_of(step, params, optimizer.init(params), params, rows())
    assert [type(each) for each in found] == [UpdateLoop, UpdateLoop]  # of `up` and of `down`
    for loop in found:
        assert len(loop.stacked) == 4 + average and len(loop.results) == 3 + average
    planned, plain = auto_shard(step, plan="fsdp:8", offload="optimizer"), jax.jit(step)
    results = [run(params, optimizer.init(params), parameters(), rows()) for run in (planned, plain)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), *results)
    assert results[0][2]["up"].sharding.memory_kind == ("pinned_host" if average else "device")


def test_small_moments_stay_on_the_device() -> None:
    def step(params: Any, moments: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"] + p["bias"]) @ p["out"]))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments

    shapes = {"w": (512, 2048), "bias": (2048,), "out": (2048, 8)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    assert offloaded_paths(step, params, params, jnp.ones((8, 512))) == {"1/w", "1/out"}  # out has 1.6 % of the bytes


OPTIMIZERS = {
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2),
    "lion": optax.lion(1e-3),
    "mixed": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "lamb": optax.lamb(1e-2),  # the norm of a whole update scales it
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=128),  # more than any dimension here has
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("clipped adamw", "scan"),
        ("lamb", "scan"),
        pytest.param("momentum", "unrolled", marks=pytest.mark.slow),
        pytest.param("every second step", "scan", marks=pytest.mark.slow),
        pytest.param("lion", "scan", marks=pytest.mark.slow),
        pytest.param("mixed", "scan", marks=pytest.mark.slow),
        pytest.param("adafactor", "scan", marks=pytest.mark.slow),
    ],
)
def test_optimizers_compute_the_same(name: str, kind: str) -> None:
    optimizer: Any = OPTIMIZERS[name]

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of(kind))(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    results = []
    for run in (jax.jit(step), auto_shard(step, plan="fsdp:8", offload="optimizer")):
        params = parameters()
        state, values = optimizer.init(params), []
        for _ in range(3):
            params, state, value = run(params, state, rows())
            values.append(float(value))
        results.append((params, state, values))
    tolerance = 1e-2 if name == "mixed" else 2e-5
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=2e-6
        ),
        *results,
    )
