"""Prices of strategies without a plan."""

import gc
import weakref

import pytest

from autoshard.sharding.planner.strategy_prices import StrategyPrices
from tests.sharding.search.test_sequence_ways import forward, inputs


@pytest.fixture(scope="module")
def prices():
    return StrategyPrices(forward, inputs(), target="v5p:2x2x2")


@pytest.mark.parametrize("limit", [None, 1.0])
def test_ways_of_attention_that_are_slower_are_left_out(prices, limit):
    """The best way is the same as if all were priced. If none fits, all are."""
    problem = prices.problem
    usual, problem.limit = problem.limit, limit or problem.limit
    best, others = problem.choose("dp:2 cp:4", {}, {}, only_best=True)
    of_all, every = problem.choose("dp:2 cp:4", {}, {})
    problem.limit = usual
    assert (best.name, best.cost.step_time_us, best.peak_bytes) == (
        of_all.name,
        of_all.cost.step_time_us,
        of_all.peak_bytes,
    )
    assert len(others) == len(every) if limit else len(others) < len(every)


def test_a_program_is_freed_without_the_garbage_collector():
    """It pauses while the programs of a search are priced, and would then have to look at all of them."""
    found = StrategyPrices(forward, inputs(), target="v5p:2x2x2")
    found.of(["dp:2 cp:4"])
    parts = [weakref.ref(part) for part in (found.problem, found.problem.cost, found.problem.axes)]
    gc.disable()
    try:
        del found
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
