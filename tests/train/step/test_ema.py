"""The moving average of the parameters: its weights, when it is updated, and which steps it skips."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autoshard
from autoshard.train.step.ema import Average, EmaConfig, averaged_params, start, updated
from tests.arrays import array

SHAPES = {"w": (3, 2), "b": (2,)}


def params(seed: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: array(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def after(how: EmaConfig, losses: list[float], sound: list[bool] | None = None, dtype: Any = jnp.float32) -> Average:
    """Return the average after one step per loss. The parameters after step i are `params(i)`, with i from 1."""
    average = start(params(0, dtype))
    for step, loss in enumerate(losses, 1):
        is_finite = jnp.asarray(True if sound is None else sound[step - 1])
        average = jax.jit(updated, static_argnames="how")(
            average, params(step, dtype), jnp.float32(loss), is_finite, jnp.int32(step), how=how
        )
    return average


def mean_of(steps: list[int], decay: float, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    """Compute the expected weighted mean in double precision."""
    weights = np.array([decay ** (len(steps) - 1 - i) for i in range(len(steps))])
    return {
        name: sum(w * np.asarray(params(s, dtype)[name], np.float64) for w, s in zip(weights, steps, strict=True))
        / weights.sum()
        for name in SHAPES
    }


def check(average: Average, steps: list[int], decay: float, dtype: Any = jnp.float32, rtol: float = 1e-6) -> None:
    for name, expected in mean_of(steps, decay, dtype).items():
        actual = averaged_params(average, params(0, dtype))[name]
        assert actual.dtype == dtype
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=rtol)


def test_it_is_the_weighted_mean_without_the_initial_value() -> None:
    """The initial value has no weight, from the first update on."""
    check(after(EmaConfig(0.9), [1.0]), [1], 0.9)
    check(after(EmaConfig(0.9), [1.0] * 7), [1, 2, 3, 4, 5, 6, 7], 0.9)


def test_it_is_updated_every_kth_step() -> None:
    check(after(EmaConfig(0.5, every=3), [1.0] * 8), [3, 6], 0.5)


def test_before_the_first_update_it_equals_the_parameters() -> None:
    average = after(EmaConfig(0.5, every=3), [1.0] * 2)
    jax.tree.map(np.testing.assert_array_equal, averaged_params(average, params(2)), params(2))


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_a_step_with_a_non_finite_loss_is_skipped(loss: float) -> None:
    check(after(EmaConfig(0.5), [1.0, loss, 1.0]), [1, 3], 0.5)


def test_a_step_with_a_non_finite_gradient_is_skipped() -> None:
    check(after(EmaConfig(0.5, spike=0.0), [1.0] * 3, [True, False, True]), [1, 3], 0.5)


def test_non_finite_parameters_do_not_enter_the_mean() -> None:
    average = after(EmaConfig(0.5), [1.0])
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params(2))
    average = updated(average, broken, jnp.float32(1), jnp.array(False), jnp.int32(2), EmaConfig(0.5))
    check(average, [1], 0.5)


def test_a_spike_enters_neither_the_mean_nor_the_mean_loss() -> None:
    losses = [1.0, 1.2, 2.5, 2.5, 1.1]
    average = after(EmaConfig(0.5, spike=2.0), losses)
    check(average, [1, 2, 5], 0.5)
    assert float(average.loss / average.loss_weight) == pytest.approx(1.1, rel=0.01)
    check(after(EmaConfig(0.5, spike=0.0), losses), [1, 2, 3, 4, 5], 0.5)


def test_negative_losses_are_not_spikes() -> None:
    check(after(EmaConfig(0.5, spike=2.0), [-1.0, -1.1, -0.9, 5.0]), [1, 2, 3], 0.5)


def test_it_is_kept_in_float32() -> None:
    """In bfloat16 a hundred small updates would be rounded away."""
    average = after(EmaConfig(0.99), [1.0] * 100, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(average)} == {jnp.dtype(jnp.float32)}
    check(average, list(range(1, 101)), 0.99, jnp.bfloat16, rtol=1e-2)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("where", ["one device", "sharded", "planned"])
def test_it_is_the_mean_of_the_stored_parameters(where: str, dtype: Any, mesh8: Mesh) -> None:
    """XLA must not drop the rounding to the stored dtype between the optimizer's update and the average."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-22, 2, (256, 64)))  # in float16, the smaller ones are subnormal
    old, gradient = (array(rng.normal(size=(256, 64)) * sizes, dtype) for _ in range(2))

    def step(old: jax.Array, average: Average, gradient: jax.Array) -> tuple[Any, Average]:
        new = optax.apply_updates(old, jnp.asarray(-1e-3, dtype) * gradient)
        return new, updated(average, new, jnp.float32(1), jnp.array(True), jnp.int32(1), EmaConfig(0.5))

    if where == "sharded":
        old, gradient = jax.device_put((old, gradient), NamedSharding(mesh8, PartitionSpec("data", "model")))
    compiled = autoshard.auto_shard(step, plan="fsdp:8") if where == "planned" else jax.jit(step)
    new, average = compiled(old, start(old), gradient)
    # With a decay of 0.5 the products are exact.
    np.testing.assert_array_equal(average.mean / average.weight, np.asarray(new, np.float32))
    np.testing.assert_array_equal(averaged_params(average, new), new)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_after_one_update_it_equals_the_parameters(dtype: Any, decay: float) -> None:
    average = after(EmaConfig(decay), [1.0], dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, averaged_params(average, params(0, dtype)), params(1, dtype))
