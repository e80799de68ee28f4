"""Known plans that are left out because they are slower than others in any case."""

import math
from dataclasses import dataclass

import pytest

from autoshard.models.workloads import workload
from autoshard.sharding.layout.plan_request import layout_of
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.search.candidate import candidate_time, price
from autoshard.sharding.search.constants import ASSIGNED_CANDIDATES, FLOOR_ERROR, KEPT_CANDIDATES
from autoshard.sharding.search.known_plans import known_plans
from autoshard.sharding.search.layout_search import distinct_layouts
from autoshard.sharding.search.time_floors import groups_of, price_promising
from autoshard.train.program.build import workload_step


@pytest.fixture(scope="module", params=[("llama-tiny", "v5e:4x8", 32), ("moe-tiny", "v5e:2x4", 8)])
def known(request):
    """All known plans of a small model, and their candidates."""
    name, target, devices = request.param
    step, state, batch = workload_step(workload(name).with_(batch_size=64, remat="none"))
    problem = PlanningProblem(trace(step, (state, batch), {}, (0,)), find_machine(None, target), None)
    axes, roles = problem.axes, problem.roles
    layouts = distinct_layouts((str(each), layout_of(axes, roles, each)) for each in known_plans(roles, devices))
    return layouts, [price(name, layout, problem.cost, problem.memory) for name, layout in layouts]


def test_no_plan_is_faster_than_the_least_time_of_its_group(known):
    layouts, candidates = known
    for members in groups_of(layouts):
        least_us = candidates[members[0]].cost.rows_us
        for n in members:
            assert candidates[n].cost.step_time_us >= candidates[n].cost.rows_us > 0
            assert candidates[n].cost.rows_us >= least_us * (1 - FLOOR_ERROR), layouts[n][0]


@dataclass(frozen=True)
class Times:
    """A candidate of which only the times matter."""

    name: str
    step_time_us: float
    rows_us: float
    fit: bool = True

    @property
    def cost(self):
        return self

    def fits(self, limit):
        return self.fit


def made_up(layouts, fit):
    """Candidates whose groups take 1, 2, 3, ... times 100 microseconds; the members of a group up to 90 more."""
    found = {}
    for number, members in enumerate(groups_of(layouts), 1):
        for place, n in enumerate(members):
            name = layouts[n][0]
            found[name] = Times(name, 100.0 * number + 10.0 * place, 100.0 * number, fit(len(found)))
    return found


@pytest.mark.parametrize("every", [1, 3])  # of every so many plans one fits
def test_the_plans_that_matter_are_priced_once(known, every):
    layouts, _ = known
    times, asked = made_up(layouts, lambda n: n % every == 0), []
    found = price_promising(layouts, lambda name, _: (asked.append(name), times[name])[1], 0.0, math.inf)
    assert [c.name for c in found] == [name for name, _ in layouts if name in asked], "their order stays"
    assert len(asked) == len(set(asked)) < len(layouts)
    by_time, priced = sorted(times.values(), key=candidate_time), sorted(found, key=candidate_time)
    assert priced[:KEPT_CANDIDATES] == by_time[:KEPT_CANDIDATES]
    fitting = [c for c in by_time if c.fit and c.step_time_us <= by_time[KEPT_CANDIDATES].step_time_us]
    assert {c.name for c in fitting[:ASSIGNED_CANDIDATES]} <= {*asked}


def test_plans_beyond_a_given_time_are_left_out(known):
    layouts, _ = known
    times = made_up(layouts, lambda n: True)
    found = price_promising(layouts, lambda name, _: times[name], 0.0, 250.0)
    assert {c.name for c in found} >= {c.name for c in times.values() if c.rows_us < 250}
    assert sum(c.cost.rows_us > 260 for c in found) == len(groups_of(layouts)) - 2, "one of each other group"


def test_all_plans_are_priced_if_none_fits(known):
    layouts, _ = known
    times = made_up(layouts, lambda n: False)
    assert len(price_promising(layouts, lambda name, _: times[name], 0.0, 250.0)) == len(layouts)
