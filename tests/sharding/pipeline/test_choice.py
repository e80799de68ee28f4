"""The search tries pipelines by itself where groups of devices are joined by slow links."""

import math
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.errors import PlanError
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.microbatches.choice import plan_in_microbatches
from autoshard.sharding.microbatches.constants import GAIN
from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.pipeline.choice import (
    plan_with_gathers,
    plan_with_pipelines,
    plan_with_schedules,
    stage_counts,
)


@pytest.mark.parametrize(
    ("target", "counts"),
    [("v5e:4x4*2", [2]), ("v5p:4x4x4*4", [2, 4]), ("h100:16x8", [2, 4, 8, 16]), ("v5p:4x4x4", [])],
)
def test_stages_across_slices_and_hosts(target, counts):
    assert stage_counts(find_target(target)) == counts


class Made:
    """A bound plan with an estimate."""

    def __init__(self, chosen, step, compute, fits=True, stages=1, schedule="1f1b", notes=()):
        estimate = SimpleNamespace(step_time_us=step, compute_us=compute, peak_memory_bytes=1.0)
        self.layout = None
        self.plan = SimpleNamespace(chosen=chosen, estimate=estimate, limit_bytes=0.0, usable_bytes=0.0, fits=fits,
                                    stages=stages, schedule=schedule, microbatches=8, notes=notes)  # fmt: skip

    def where(self, notes):
        self.plan.notes = notes
        return self


def chosen(plain, steps, microbatches=1):
    """The plan that is chosen, and the pipelines that are tried: (stages, schedule, microbatches)."""
    tried = []

    def staged(stages, schedule, number, most_us):
        schedule = schedule or "1f1b"
        tried.append((stages, schedule, number))
        if stages == 8:
            raise PlanError("auto_shard(step): too few layers")
        time = steps.get((stages, schedule, number), steps.get((stages, schedule), 2000.0))
        return Made(f"pp:{stages}", time, 300.0, stages=stages, schedule=schedule)

    return plan_with_pipelines([2, 4, 8], microbatches, lambda: plain, staged).plan, tried


def test_the_fastest_pipeline_is_chosen_with_its_schedule():
    found, tried = chosen(Made("dp:8", 1000.0, 300.0), {(2, "1f1b"): 800.0, (4, "1f1b"): 700.0, (4, "zb"): 500.0})
    assert (found.chosen, found.schedule) == ("pp:4", "zb")
    assert tried[:3] == [(2, "1f1b", 1), (4, "1f1b", 1), (8, "1f1b", 1)] and (4, "zb", 8) in tried
    assert "too few layers" not in found.notes[-1], "the user asked for no pipeline"


def test_the_default_schedule_is_searched_again_without_a_bound():
    """The plan without a pipeline bounds its first search, which may leave out what local search would improve."""
    steps = {(4, "1f1b"): 700.0, (4, "zb"): 500.0, (4, "1f1b", 8): 450.0}
    assert chosen(Made("dp:8", 1000.0, 300.0), steps)[0].schedule == "1f1b"
    steps = {(4, "1f1b"): 500.0, (4, "1f1b", 8): 450.0}
    found, tried = chosen(Made("dp:8", 1000.0, 300.0), steps)
    assert found.estimate.step_time_us == 500.0 and (4, "1f1b", 8) not in tried, "no other schedule is faster"


def test_pipelines_are_told_which_step_time_is_of_no_use():
    limits = []

    def staged(stages, schedule, number, most_us):
        limits.append(most_us)
        return Made(f"pp:{stages}", 500.0, 300.0, stages=stages, schedule=schedule or "1f1b")

    plan_with_pipelines([2, 4], 1, lambda: Made("dp:8", 1000.0, 300.0), staged)
    assert limits[:2] == [(1 - GAIN) * 1000.0, (1 - GAIN) * 500.0]
    plan_with_pipelines([2], 1, lambda: Made("dp:8", 1000.0, 300.0, fits=False), staged)
    assert math.inf in limits, "a plan that does not fit sets no limit"


def test_no_pipeline_is_tried_where_its_idle_ticks_take_longer_than_the_links():
    found, tried = chosen(Made("dp:8", 1000.0, 970.0), {(2, "1f1b"): 100.0})
    assert found.chosen == "dp:8" and not tried
    assert chosen(Made("dp:8", 1000.0, 800.0), {}, microbatches=8)[1] == [(2, "1f1b", 8)], "4 stages are idle for 3/8"
    assert chosen(Made("dp:8", 1000.0, 970.0, fits=False), {})[1], "whatever it takes, if nothing else fits"


@pytest.mark.slow
def test_a_pipeline_across_slices_needs_no_request():
    """The activations of 4096 rows are small beside the weights, whose gradients wait for the links between slices."""

    def step(weights, x):
        def loss(weights):
            return (jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w[0]) @ w[1], None), x, weights)[0] ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    up, down, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 4096, 16384), (8, 16384, 4096), (4096, 4096)))
    made = plan(step, (up, down), x, target="v5e:4x4*4", donate_argnums=0)
    assert made.stages == 4 and made.microbatches >= 4
    assert "with pipelines: pp:2" in made.notes[-1]


def test_a_pipeline_that_is_too_slow_is_named_with_its_bound():
    def staged(stages, schedule, number, most_us):
        if stages == 2:
            raise TooSlow(1500.0, is_final=True)
        return Made(f"pp:{stages}", 900.0, 300.0, stages=stages, schedule=schedule or "1f1b")

    found = plan_with_pipelines([2, 4], 1, lambda: Made("dp:8", 1000.0, 300.0), staged).plan
    assert found.chosen == "pp:4"
    assert "with pipelines: pp:2 1f1b (at least 1.50 ms); pp:4" in found.notes[-1]


def tried_counts(outcomes: dict[int, Any]) -> Any:
    """The numbers of microbatches that "auto" tries, and its choice; outcomes: a time, or (bound, whether final)."""
    tried = []
    cut: Any = lambda traced, count: count  # noqa: E731

    def planned(step):
        tried.append(step)
        found = outcomes[step]
        if isinstance(found, tuple):
            raise TooSlow(*found)
        return Made(f"pp:2 x{step}", found, 1.0)

    try:
        return tried, plan_in_microbatches(cast(Any, None), "auto", planned, cut, 4).plan.chosen
    except TooSlow as found:
        return tried, found.least_us


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({4: (900.0, True)}, ([4], 900.0)),
        ({4: (900.0, False), 8: (895.0, False)}, ([4, 8], 895.0)),  # more microbatches gain nothing
        ({4: (900.0, False), 8: (800.0, False), 16: (790.0, False)}, ([4, 8, 16], 790.0)),
        ({4: (900.0, False), 8: 700.0, 16: 600.0, 32: 650.0}, ([4, 8, 16, 32], "pp:2 x16")),
        ({4: 700.0, 8: (710.0, False)}, ([4, 8], "pp:2 x4")),
    ],
)
def test_more_microbatches_are_tried_while_they_may_help(outcomes, expected):
    assert tried_counts(outcomes) == expected


def test_a_gather_once_that_is_too_slow_is_named_with_its_bound(monkeypatch):
    monkeypatch.setattr("autoshard.sharding.pipeline.choice._axes_of_shards", lambda layout: ["fsdp"])
    made = Made("pp:2 fsdp:4", 1000.0, 300.0)

    def once():
        raise TooSlow(1500.0, is_final=False)

    found = plan_with_gathers(made, once)
    assert found is made and "compared gather='once' (at least 1.50 ms) with 'repeat'" in found.plan.notes[-1]


def test_a_schedule_that_is_too_slow_is_left_out():
    def planned(word):
        if word == "ftb":
            raise TooSlow(1500.0, is_final=False)
        return Made("pp:2", 1000.0, 300.0, fits=False, schedule=word)

    assert plan_with_schedules(planned, "1f1b", ("ftb",)).plan.schedule == "1f1b"
