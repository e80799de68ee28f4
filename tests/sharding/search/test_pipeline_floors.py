"""Pipelines that are given up because no plan of them is fast enough."""

import math

import pytest

from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.search.layout_search import search
from autoshard.sharding.search.pipeline_floors import check_in_time, least_us
from tests.sharding.cost.bounds.test_pipeline_time import MICROBATCHES, PROGRAMS, STAGES, layouts, problem


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


def checked(program, most_us):
    """Run the check, and return what it raises."""
    with pytest.raises(TooSlow) as found:
        check_in_time(layouts(*program), problem(*program).cost, MICROBATCHES, STAGES, most_us, set())
    return found.value


def test_a_pipeline_is_given_up_if_the_least_bound_of_its_plans_is_too_long(program):
    cost = problem(*program).cost
    least = min(max(least_us(name, each, cost, MICROBATCHES, STAGES)) for name, each in layouts(*program))
    check_in_time(layouts(*program), cost, MICROBATCHES, STAGES, 1.001 * least, set())  # raises nothing
    slow = checked(program, 0.999 * least)
    assert slow.least_us == pytest.approx(least) and not slow.is_final
    idle = (MICROBATCHES + STAGES - 1) / MICROBATCHES
    assert not checked(program, 1.001 * least / idle).is_final, "more microbatches leave less idle time"
    slow = checked(program, 0.999 * least / idle)
    assert slow.is_final and least / idle < slow.least_us <= least


def test_plans_that_more_microbatches_do_not_help_are_not_checked_again(program):
    cost, names, idle = problem(*program).cost, layouts(*program), (MICROBATCHES + STAGES - 1) / MICROBATCHES
    bounds = {name: max(least_us(name, each, cost, MICROBATCHES, STAGES)) for name, each in names}
    most_us, slow = 0.99 * min(bounds.values()), set()
    with pytest.raises(TooSlow) as found:
        check_in_time(names, cost, MICROBATCHES, STAGES, most_us, slow)
    assert slow == {name for name, bound in bounds.items() if bound > idle * most_us}
    assert 0 < len(slow) < len(names) and not found.value.is_final
    check_in_time(names, cost, MICROBATCHES, STAGES, math.inf, {*bounds} - {min(bounds, key=bounds.__getitem__)})
    with pytest.raises(TooSlow) as found:
        check_in_time(names, cost, MICROBATCHES, STAGES, math.inf, {*bounds})
    assert found.value.is_final, "none is left"


def test_a_check_prices_only_what_it_needs(program):
    found = problem(*program)
    names = [(name, each) for name, each in layouts(*program)]
    cost = PlanningProblem(found.traced, found.machine, None).cost
    rough = [next(least_us(name, each, cost, MICROBATCHES, STAGES)) for name, each in names]
    with pytest.raises(TooSlow):
        check_in_time(names, cost, MICROBATCHES, STAGES, 0.5 * min(rough), set())
    assert not any(cost._memo), "the least times of kernels suffice"


def test_a_search_of_a_pipeline_ends_early_if_it_has_a_bound(program):
    found = problem(*program)
    models = found.axes, found.roles, found.cost, found.memory, found.machine.target.devices, math.inf
    best, _ = search(*models, microbatches=MICROBATCHES)
    assert search(*models, most_us=2 * best.cost.step_time_us, microbatches=MICROBATCHES)[0].name == best.name
    with pytest.raises(TooSlow):
        search(*models, most_us=0.1 * best.cost.step_time_us, microbatches=MICROBATCHES)
