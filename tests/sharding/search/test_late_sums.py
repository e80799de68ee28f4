"""Which groups of rows a search in microbatches compares: those of the best plan that reduces gradients once."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.microbatches.constants import GAIN
from autoshard.sharding.microbatches.replicas import GroupedRows
from autoshard.sharding.search.late_sums import Groups

SHAPES = jax.ShapeDtypeStruct((8, 1024, 1024), "float32"), jax.ShapeDtypeStruct((4096, 1024), "float32")


def train_step(weights, x):
    def loss(weights):
        return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradients, value


def test_a_search_finds_the_pipeline_that_is_fast_with_groups_only():
    """Without groups, `dp` reduces gradients in each tick, and `tp` is faster."""
    words = {"target": "v5p:2x2x1*2", "schedule": "1f1b", "microbatches": 4}
    searched = plan(train_step, *SHAPES, **words, gather="repeat")
    requested = plan(train_step, *SHAPES, **words, plan="pp:2 dp:4")
    assert searched.replicas == requested.replicas == 4
    assert searched.estimate.step_time_us <= requested.estimate.step_time_us


def searches(groups, most_us=1e9, error=0.0, grouped_us=500.0):
    """Return the searches of two numbers of microbatches, 4 and 8, as (microbatches, groups), and their times."""
    done: list[tuple[int, int]] = []
    whole: Any = None

    def cut(traced: Any, count: int, replicas: int = 1) -> Any:
        return SimpleNamespace(microbatches=count, replicas=replicas)

    def planned(step, most_us):
        done.append((step.microbatches, step.replicas))
        time = 1000.0 if step.replicas == 1 else grouped_us
        made = SimpleNamespace(estimate=SimpleNamespace(step_time_us=time), fits=True)
        return SimpleNamespace(plan=made, groups=groups if step.replicas == 1 else None)

    rows = GroupedRows(whole, cut, planned, most_us, error)
    times = [rows.planned(rows.cut(whole, count)).plan.estimate.step_time_us for count in (4, 8)]
    return done, times


def test_groups_that_were_faster_are_kept_for_more_microbatches():
    assert searches(Groups(2, 600.0)) == ([(4, 1), (4, 2), (8, 2)], [500.0, 500.0])
    assert searches(Groups(2, 600.0), grouped_us=1100.0) == ([(4, 1), (4, 2), (8, 1), (8, 2)], [1000.0, 1000.0])


@pytest.mark.parametrize(
    ("groups", "most_us", "error"),
    [(None, 1e9, 0.0), (Groups(2, (1 - GAIN) * 1000.0), 1e9, 0.0), (Groups(2, 600.0), 500.0, 0.1)],
)
def test_groups_that_are_not_faster_are_not_searched(groups, most_us, error):
    assert searches(groups, most_us, error)[0] == [(4, 1), (8, 1)]


def test_the_error_of_estimates_leaves_room():
    assert searches(Groups(2, 540.0), 500.0, 0.1)[0][1] == (4, 2)
