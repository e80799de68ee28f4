"""Lower bounds of the time of a pipeline, for all ways to run its plan."""

import contextlib
import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PlanError
from autoshard.models.workloads import workload
from autoshard.sharding.cost.collectives import best_assignment
from autoshard.sharding.layout.plan_request import layout_of, parse_request
from autoshard.sharding.layout.sequence_words import sequence_variants
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.microbatches.replicas import axes_of_groups
from autoshard.sharding.pipeline.pipelining import with_stages
from autoshard.sharding.plan.gather_words import ONCE
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.search.known_plans import known_plans
from autoshard.sharding.search.layout_search import distinct_layouts
from autoshard.sharding.search.pipeline_floors import least_us
from autoshard.sharding.search.state_spread import state_spreads
from autoshard.train.program.build import workload_step

STAGES, MICROBATCHES = 2, 4
PROGRAMS = {"dense": ("llama-tiny", "v5e:4x4"), "experts": ("mixtral-tiny", "h100:2x8")}


@functools.cache
def traced(name):
    step, state, batch = workload_step(workload(name).with_(batch_size=64, remat="none"))
    return trace(step, (state, batch), {}, (0,))


@functools.cache
def problem(name, target, replicas=1, once=False):
    """Return the problem of a pipeline of a small model."""
    options = {"stages": STAGES, "schedule": "1f1b", "replicas": replicas, "numerics": True}
    cut = with_stages(traced(name), MICROBATCHES, gathers_once=once, **options)
    return PlanningProblem(cut, find_machine(None, target), None, gather=ONCE if once else "")


@functools.cache
def layouts(name, target):
    found = problem(name, target)
    plans = known_plans(found.roles, found.machine.target.devices, STAGES)
    return distinct_layouts((str(each), layout_of(found.axes, found.roles, each)) for each in plans)


def time_us(found, words):
    """Return the time of a step under the best device assignment."""
    chosen = layout_of(found.axes, found.roles, parse_request(words))
    return best_assignment(found.machine.target, chosen.mesh, found.cost(chosen))[1].step_time_us


def ways(program, words):
    """Yield the times of the ways to run a plan: (way, microseconds)."""
    found = problem(*program)
    yield "itself", time_us(found, words)
    for other in sequence_variants(found.axes, parse_request(words)):
        yield other, time_us(found, other)
    for once in (False, True):
        count = math.prod(axes_of_groups(words, gathers_once=once).values())
        for replicas in {1, count} if once else {count} - {1}:
            with contextlib.suppress(PlanError):  # the rows of a microbatch do not divide into groups
                yield f"{replicas} groups, once: {once}", time_us(problem(*program, replicas, once), words)


@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_bound_exceeds_the_time_of_any_way_to_run_a_plan(program, data):
    name, chosen = data.draw(st.sampled_from(layouts(*PROGRAMS[program])))
    bounds = list(least_us(name, chosen, problem(*PROGRAMS[program]).cost, MICROBATCHES, STAGES))
    assert bounds == pytest.approx(sorted(bounds)), name
    for way, time in ways(PROGRAMS[program], name):
        assert 0 < bounds[-1] <= time, (name, way)


@pytest.mark.parametrize("program", PROGRAMS)
def test_bounds_are_near_the_time_of_the_fastest_way(program):
    found, shares = problem(*PROGRAMS[program]), []
    for name, chosen in layouts(*PROGRAMS[program])[::5]:
        bound = max(least_us(name, chosen, found.cost, MICROBATCHES, STAGES))
        shares.append(bound / min(time for _, time in ways(PROGRAMS[program], name)))
    assert sorted(shares)[len(shares) // 2] > 0.5


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_spread_of_state_is_faster_than_the_bounds_of_all_known_plans(program):
    found = problem(*PROGRAMS[program])
    known = layouts(*PROGRAMS[program])
    of_inner = {}
    for name, chosen in known:
        plan = parse_request(name)
        inner = tuple((a, n) for a, n in plan.sizes.items() if a not in ("dp", "zero1", "fsdp")), plan.flags - {"state"}
        bound = max(least_us(name, chosen, found.cost, MICROBATCHES, STAGES))
        of_inner.setdefault(inner, []).append((bound, name))
    for some in list(of_inner.values())[::4]:
        bound, name = min(some)
        for spread in state_spreads(parse_request(name)):
            assert bound <= time_us(found, str(spread)), spread
