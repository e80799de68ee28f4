"""Known plans that are left out because they are slower than others in any case."""

import math
from dataclasses import dataclass

import pytest

from autoshard.models.workloads import workload
from autoshard.sharding.layout.plan_request import layout_of
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.search.candidate import candidate_ranked_us, price
from autoshard.sharding.search.constants import ASSIGNED_CANDIDATES, KEPT_CANDIDATES
from autoshard.sharding.search.known_plans import known_plans
from autoshard.sharding.search.layout_search import distinct_layouts
from autoshard.sharding.search.strategy_kinds import kind_of
from autoshard.sharding.search.time_floors import price_promising
from autoshard.train.program.build import workload_step


@pytest.fixture(
    scope="module",
    params=[("llama-tiny", "v5e:4x8", 32), pytest.param(("mixtral-tiny", "h100:2x8", 16), marks=pytest.mark.slow)],
    ids=lambda param: param[0],
)
def known(request):
    """All known plans of a small model, their candidates, and the cost model."""
    name, target, devices = request.param
    step, state, batch = workload_step(workload(name).with_(batch_size=2 * devices, remat="none"))
    problem = PlanningProblem(trace(step, (state, batch), {}, (0,)), find_machine(None, target), None)
    axes, roles = problem.axes, problem.roles
    layouts = distinct_layouts((str(each), layout_of(axes, roles, each)) for each in known_plans(roles, devices))
    return layouts, [price(name, layout, problem.cost, problem.memory) for name, layout in layouts], problem.cost


def test_the_fastest_plans_are_those_of_a_search_that_prices_all(known):
    layouts, every, cost = known
    of_name = {c.name: c for c in every}
    found = price_promising(layouts, lambda name, layout: of_name[name], cost.least_us, math.inf, math.inf)
    fastest, expected = (sorted(some, key=candidate_ranked_us)[:KEPT_CANDIDATES] for some in (found, every))
    assert [c.name for c in fastest] == [c.name for c in expected]
    for kind in {kind_of(c.name) for c in every}:
        times = [min(candidate_ranked_us(c) for c in some if kind_of(c.name) == kind) for some in (found, every)]
        assert times[0] == times[1], kind


@dataclass(frozen=True)
class Times:
    """A candidate of which only the times matter."""

    name: str
    step_time_us: float
    least_us: float
    fit: bool = True
    peak_bytes: float = 0.0
    usable_bytes: float = math.inf

    @property
    def cost(self):
        return self

    def fits(self, limit):
        return self.fit


class MadeUp:
    """Candidates with made-up times: bounds of 100, 110, 120, ... microseconds. Each takes 5 us more than its bound.

    Attributes:
        times: strategy -> its candidate.
        priced: the strategies that were priced, in order.
        bounds: the lower bounds that were asked for, each with the last one of its plan.
    """

    def __init__(self, layouts, fit=lambda n: True):
        self.layouts, self.times, self.priced, self.bounds, self.of_layout = layouts, {}, [], [], {}
        for n, (name, layout) in enumerate(layouts):
            least = 100.0 + 10.0 * n
            self.times[name] = Times(name, least + 5.0, least, fit(n))
            self.of_layout[id(layout)] = least

    def price(self, name, layout):
        self.priced.append(name)
        return self.times[name]

    def least_us(self, layout):
        least = self.of_layout[id(layout)]
        for bound in (least / 2, least):
            self.bounds.append((bound, least))
            yield bound

    def promising(self, most_us=math.inf):
        return price_promising(self.layouts, self.price, self.least_us, 0.0, most_us)


@pytest.mark.parametrize("every", [1, 3])  # of every so many plans one fits
def test_the_plans_that_matter_are_priced_once(known, every):
    layouts, *_ = known
    made = MadeUp(layouts, lambda n: n % every == 0)
    found, times = made.promising(), made.times
    assert [c.name for c in found] == [name for name, _ in layouts if name in made.priced], "their order stays"
    assert len(made.priced) == len(set(made.priced)) < len(layouts)
    by_time, priced = sorted(times.values(), key=candidate_ranked_us), sorted(found, key=candidate_ranked_us)
    assert priced[:KEPT_CANDIDATES] == by_time[:KEPT_CANDIDATES]
    fitting = [c for c in by_time if c.fit and c.step_time_us <= by_time[KEPT_CANDIDATES].step_time_us]
    assert {c.name for c in fitting[:ASSIGNED_CANDIDATES]} <= {*made.priced}


def test_the_best_of_each_kind_is_priced(known):
    layouts, *_ = known
    made = MadeUp(layouts)
    found = made.promising(150.0)
    kinds = {kind_of(name) for name, _ in layouts}
    for kind in kinds:
        best = min((c for c in made.times.values() if kind_of(c.name) == kind), key=candidate_ranked_us)
        assert best in found, kind


def test_plans_beyond_a_given_time_are_left_out(known):
    layouts, *_ = known
    made = MadeUp(layouts)
    found = made.promising(250.0)
    assert {c.name for c in found} >= {c.name for c in made.times.values() if c.least_us < 250}
    assert len([c for c in found if made.times[c.name].least_us > 250]) < len(layouts) / 2


def test_bounds_rise_only_as_far_as_they_matter(known):
    layouts, *_ = known
    made = MadeUp(layouts)
    made.promising(150.0)
    complete = [least for bound, least in made.bounds if bound == least]
    assert len(complete) < 0.75 * len(layouts)


def test_all_plans_are_priced_if_none_fits(known):
    layouts, *_ = known
    assert len(MadeUp(layouts, lambda n: False).promising(250.0)) == len(layouts)
