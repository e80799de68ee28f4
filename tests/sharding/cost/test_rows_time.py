"""Lower bounds of the time of rows of the batch."""

import pytest

from tests.sharding.cost.test_equivalence_classes import STRATEGIES, layout, problem


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bounds_rise_to_the_time_of_rows(strategy):
    cost, chosen = problem().cost, layout(strategy)
    bounds = list(cost.rows_us(chosen))
    assert bounds == pytest.approx(sorted(bounds))
    assert bounds[-1] == pytest.approx(cost(chosen).rows_us)
    assert len(bounds) > 2


def test_the_first_bound_is_the_same_for_all_layouts():
    firsts = [next(problem().cost.rows_us(layout(strategy))) for strategy in STRATEGIES]
    assert len(set(firsts)) == 1 and firsts[0] > 0


def test_classes_that_took_long_are_priced_first():
    cost, slow = problem().cost, layout("tp:8 state")
    list(cost.rows_us(slow))
    first, *bounds = cost.rows_us(slow)
    assert bounds[len(bounds) // 4] - first > 0.9 * (bounds[-1] - first) > 0
