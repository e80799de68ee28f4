"""The planner chooses updates of whole matrices if they are faster."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.planner import update_choice
from autoshard.sharding.program.tracing import trace
from tests.sharding.rewrite.updates.programs import by_hand, by_optax, moments_of, muon, orthogonal

WIDTH, HIDDEN = 2048, 8192


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def made(plan: str | None, matrices: int = 8) -> autoshard.Plan:
    pairs = [{"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)} for _ in range(matrices // 2)]
    params = {"layers": pairs, "bias": shape(WIDTH)}
    state = jax.eval_shape(lambda params: moments_of(params, muon()), params)
    return autoshard.plan(by_optax(muon()), state, shape(64, 64, WIDTH), target="v5p:2x2x2", plan=plan)


@pytest.mark.parametrize("plan", ["dp:8", "fsdp:8", None])
def test_whole_matrices_are_faster_than_the_same_products_on_all_devices(plan, monkeypatch):
    chosen = made(plan)
    assert chosen.spread_updates
    monkeypatch.setattr(update_choice, "with_spread_updates", lambda traced, devices: traced)
    assert made(plan).estimate.step_time_us > 1.1 * chosen.estimate.step_time_us


def test_shards_are_faster_where_there_are_fewer_matrices_than_devices():
    few, many = made("tp:8", 2), made("tp:8", 16)
    assert not few.spread_updates and many.spread_updates
    assert not [note for note in few.notes if "whole matrices" in note]


def test_a_program_that_cannot_be_planned_with_whole_matrices_is_planned_without():
    def first(traced: Any, **options: Any) -> Any:
        if traced.spread_updates:
            raise PlanError("such as a name of a logical axis that only one of the programs has")
        return traced

    params = [jnp.ones((16, 32))] * 2
    step = by_hand(orthogonal, lambda params, x: jnp.mean(sum(x @ w for w in params) ** 2))
    traced = trace(step, ((params, params), jnp.ones((4, 16))), {})
    assert update_choice.plan_with_spread_updates(traced, 8, first, first, 1e9, None) is traced


@pytest.mark.parametrize("whole_us", [1.0, 3.0])
@pytest.mark.parametrize("shortlist", [None, "the two best"])
def test_the_faster_plan_is_kept_and_warnings_come_once(shortlist, whole_us, monkeypatch):
    monkeypatch.setattr(update_choice, "plan_ranked_us", lambda plan: plan.time_us)
    limits = []

    def planned(traced: Any, *, most_us: float, shortlist: Any = None) -> Any:
        warnings.warn("as planned", AutoshardWarning, stacklevel=2)
        limits.append(most_us)
        is_whole = traced.spread_updates
        plan = SimpleNamespace(fits=True, spread_updates=is_whole, time_us=whole_us if is_whole else 2.0)
        return SimpleNamespace(plan=plan, shortlist=shortlist)

    params = [jnp.ones((16, 32))] * 2
    step = by_hand(orthogonal, lambda params, x: jnp.mean(sum(x @ w for w in params) ** 2))
    traced = trace(step, ((params, params), jnp.ones((4, 16))), {})
    with pytest.warns(AutoshardWarning) as found:
        made = update_choice.plan_with_spread_updates(traced, 8, planned, planned, 9.0, shortlist)
    assert made.plan.spread_updates is (whole_us == 1.0) and made.shortlist == shortlist
    assert limits[:2] == [9.0, whole_us] and len(found) == 1


@pytest.mark.parametrize("fits", [(True, False), (False, True), (False, False)])
def test_a_plan_that_fits_is_kept_or_else_the_one_that_needs_less(fits, monkeypatch):
    monkeypatch.setattr(update_choice, "plan_ranked_us", lambda plan: plan.time_us)

    def planned(traced: Any, *, most_us: float, shortlist: Any = None) -> Any:
        whole = traced.spread_updates
        plan = SimpleNamespace(fits=fits[0 if whole else 1], spread_updates=whole, time_us=2.0 if whole else 1.0)
        plan.estimate = SimpleNamespace(peak_memory_bytes=5.0 if whole else 6.0)
        return SimpleNamespace(plan=plan)

    params = [jnp.ones((16, 32))] * 2
    step = by_hand(orthogonal, lambda params, x: jnp.mean(sum(x @ w for w in params) ** 2))
    traced = trace(step, ((params, params), jnp.ones((4, 16))), {})
    made = update_choice.plan_with_spread_updates(traced, 8, planned, planned, 9.0, None)
    assert made.plan.spread_updates is (fits != (False, True))
