"""The search chooses the fastest candidate that fits."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.search import layout_search
from autoshard.sharding.search.constants import MOST_KIND_ERROR
from tests.sharding.programs import mlp_loss, mlp_state


def train_step():
    """A step of many small tensors. It is fastest with replicated parameters, because messages cost latency."""
    state = jax.eval_shape(lambda: [mlp_state(hidden=32) for _ in range(6)])

    def step(state, x):
        gradients = jax.grad(lambda state: sum(mlp_loss(params, x) for params in state))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)

    return step, state, jax.ShapeDtypeStruct((2**10, 64), "float32")


def test_the_fastest_candidate_that_fits_is_chosen():
    options: Any = dict(target="h100:8", donate_argnums=0)
    unlimited = plan(*train_step(), **options)
    peaks = {name: peak for name, _, peak in unlimited.candidates}
    assert min(peaks.values()) < peaks[unlimited.chosen]
    for limit in (min(peaks.values()), peaks[unlimited.chosen] - 1, peaks[unlimited.chosen]):
        planned = plan(*train_step(), memory_limit_bytes=limit, **options)
        fastest = min(us for _, us, peak in unlimited.candidates if peak <= limit)
        assert planned.estimate.peak_memory_bytes <= limit
        assert planned.estimate.step_time_us == pytest.approx(fastest, abs=1e-3)
    with pytest.raises(PlanError, match="no plan fits"):
        plan(*train_step(), memory_limit_bytes=min(peaks.values()) / 2, **options)


@pytest.mark.parametrize(("bound", "climbs"), [(math.inf, True), (1e-3, False)])
def test_local_search_runs_if_a_changed_plan_may_gain(bound, climbs, monkeypatch):
    """A bound below the time of the kernels, which no plan can reach, makes it pointless."""
    step, *args = train_step()
    problem = bound_or_error(plan(step, *args, target="h100:8").bound).problem
    calls = []
    monkeypatch.setattr(layout_search, "hill_climb", lambda *given: calls.append(given) or [])
    problem.search({}, {}, None, most_us=bound)
    assert bool(calls) == climbs


def test_a_candidate_has_the_same_price_when_it_is_requested():
    options: Any = dict(target="h100:8", donate_argnums=0)
    for name, step_time_us, peak in plan(*train_step(), **options).candidates:
        requested = plan(*train_step(), plan=name, **options).estimate
        assert (step_time_us, peak) == pytest.approx((requested.step_time_us, requested.peak_memory_bytes)), name


def test_a_slow_variant_that_fits_is_preferred_to_a_fast_one_that_does_not():
    def fn(x, w, *, careful):
        if not careful:
            return jnp.tanh(jnp.einsum("bk,ckn->bcn", x, w)).sum((1, 2))

        def part(total, w):
            return total + (jnp.tanh(x @ w) + jnp.tanh(x @ -w) + jnp.tanh(x @ w)).sum(1), None

        return jax.lax.scan(part, jnp.zeros(len(x)), w)[0]

    x, w = jax.ShapeDtypeStruct((2**15, 512), "float32"), jax.ShapeDtypeStruct((64, 512, 4096), "float32")
    with pytest.warns(AutoshardWarning, match="does not fit 4.00 GiB"):
        fast = plan(fn, x, w, target="cpu:8", plan="dp:8", variants={"careful": [False]})
        planned = plan(fn, x, w, target="cpu:8", plan="dp:8", variants={"careful": [False, True]})
    assert planned.fits and not fast.fits and planned.variant == {"careful": True}
    assert planned.function == "fn"
    assert planned.estimate.step_time_us > fast.estimate.step_time_us


@pytest.mark.parametrize(
    ("gain", "kept"), [(0.0, False), (0.9 * MOST_KIND_ERROR, False), (1.1 * MOST_KIND_ERROR, True)]
)
def test_idle_devices_have_to_gain_more_than_the_error_of_the_estimate(gain, kept):
    def candidate(step_time_us, *idle):
        layout = SimpleNamespace(idle_axes=lambda: [*idle])
        cost = SimpleNamespace(step_time_us=step_time_us)
        return SimpleNamespace(layout=layout, cost=cost, peak_bytes=1.0, usable_bytes=math.inf, fits=lambda limit: True)

    busy, idle = candidate(100.0), candidate(100.0 / (1 + gain), "cp")
    found = layout_search._without_idle([busy, idle], math.inf)  # pyright: ignore[reportArgumentType]
    assert found == [busy, idle] if kept else found == [busy]


def test_no_mesh_axis_is_idle_without_gain():
    def step(params, tokens):
        def loss(params):
            x = params["table"][tokens]  # [batch, 9, 64]: nine positions are not divisible by 2
            return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"table": (512, 64), "w": (64, 256), "v": (256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    planned = plan(step, params, jax.ShapeDtypeStruct((256, 9), "int32"), target="h100:8")
    assert not bound_or_error(planned.bound).layout.idle_axes()
    assert all(time >= planned.estimate.step_time_us for _, time, _ in planned.candidates)
