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


LIMIT = 100.0  # bytes


class Made:
    """A bound plan of a search: the fastest of its candidates."""

    def __init__(self, groups, *candidates):
        chosen, time, peak = candidates[0]
        estimate = SimpleNamespace(step_time_us=time, peak_memory_bytes=peak)
        self.plan = SimpleNamespace(
            estimate=estimate, fits=True, chosen=chosen, candidates=candidates, limit_bytes=LIMIT, usable_bytes=LIMIT
        )
        self.groups = groups

    def where(self, candidates):
        self.plan.candidates = candidates
        return self


def searches(groups, most_us=1e9, error=0.0, grouped_us=500.0, grouped_bytes=9.0):
    """Return the searches of two numbers of microbatches, 4 and 8, as (microbatches, groups), and their plans."""
    done: list[tuple[int, int]] = []
    whole: Any = None

    def cut(traced: Any, count: int, replicas: int = 1) -> Any:
        return SimpleNamespace(microbatches=count, replicas=replicas)

    def planned(step, most_us):
        done.append((step.microbatches, step.replicas))
        if step.replicas > 1:
            return Made(None, ("dp:4", grouped_us, grouped_bytes), ("tp:4", 1700.0, 2.0))
        return Made(groups, ("fsdp:4", 1000.0, 1.0), ("tp:4", 1500.0, 3.0), ("dp:4", 1600.0, 9.0))

    rows = GroupedRows(whole, cut, planned, most_us, error)
    return done, [rows.planned(rows.cut(whole, count)).plan for count in (4, 8)]


def times(plans):
    return [each.estimate.step_time_us for each in plans]


@pytest.mark.parametrize(("grouped_us", "fastest"), [(500.0, "dp:4"), (1100.0, "fsdp:4")])
def test_candidates_have_their_times_without_groups_or_with_them(grouped_us, fastest):
    (first, _) = searches(Groups(2, 600.0), grouped_us=grouped_us)[1]
    assert {name: time for name, time, _ in first.candidates} == {"fsdp:4": 1000.0, "dp:4": grouped_us, "tp:4": 1500.0}
    assert first.candidates[0][0] == first.chosen == fastest


@pytest.mark.parametrize(("grouped_bytes", "fastest"), [(94.0, "dp:4"), (100.0, "fsdp:4")])
def test_groups_that_almost_fill_the_memory_count_as_slower(grouped_bytes, fastest):
    """The groups are 5 % faster. If they fill the memory, they are ranked as 8 % slower."""
    (first, _) = searches(Groups(2, 600.0), grouped_us=950.0, grouped_bytes=grouped_bytes)[1]
    assert first.chosen == fastest


def test_groups_that_were_faster_are_kept_for_more_microbatches():
    done, plans = searches(Groups(2, 600.0))
    assert (done, times(plans)) == ([(4, 1), (4, 2), (8, 2)], [500.0, 500.0])
    done, plans = searches(Groups(2, 600.0), grouped_us=1100.0)
    assert (done, times(plans)) == ([(4, 1), (4, 2), (8, 1), (8, 2)], [1000.0, 1000.0])


@pytest.mark.parametrize(
    ("groups", "most_us", "error"),
    [(None, 1e9, 0.0), (Groups(2, (1 - GAIN) * 1000.0), 1e9, 0.0), (Groups(2, 600.0), 500.0, 0.1)],
)
def test_groups_that_are_not_faster_are_not_searched(groups, most_us, error):
    assert searches(groups, most_us, error)[0] == [(4, 1), (8, 1)]


def test_the_error_of_estimates_leaves_room():
    assert searches(Groups(2, 540.0), 500.0, 0.1)[0][1] == (4, 2)
