"""Lower bounds of the time of a step."""

import functools
import statistics

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autoshard.models.workloads import workload
from autoshard.sharding.cost.collectives import is_hidden_on
from autoshard.sharding.layout.plan_request import layout_of
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.pipeline.pipelining import with_stages
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.search.known_plans import known_plans
from autoshard.sharding.search.layout_search import distinct_layouts
from autoshard.train.program.build import workload_step
from tests.sharding.cost.test_equivalence_classes import STRATEGIES, layout, problem


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bounds_rise_to_nearly_the_time_of_a_step(strategy):
    cost, chosen = problem().cost, layout(strategy)
    bounds, time_us = list(cost.least_us(chosen)), cost(chosen).step_time_us
    assert bounds == pytest.approx(sorted(bounds))
    assert 0.7 * time_us < bounds[-1] <= time_us
    assert len(bounds) > 2


def test_the_first_bound_is_the_same_for_all_layouts():
    firsts = [next(problem().cost.least_us(layout(strategy))) for strategy in STRATEGIES]
    assert len(set(firsts)) == 1 and firsts[0] > 0


def test_classes_that_took_long_are_priced_first():
    cost, slow = problem().cost, layout("tp:8 state")
    list(cost.least_us(slow))
    first, *bounds = cost.least_us(slow)
    assert bounds[len(bounds) // 4] - first > 0.9 * (bounds[-1] - first) > 0


@functools.cache
def drawn_from(name, target, stages, gather):
    """Return the cost model of a small model, and its known plans."""
    step, state, batch = workload_step(workload(name).with_(batch_size=32, remat="none"))
    traced = trace(step, (state, batch), {}, (0,))
    if stages > 1:
        traced = with_stages(traced, 2 * stages, stages=stages, schedule="1f1b", numerics=False)
    found = PlanningProblem(traced, find_machine(None, target), None, gather=gather)
    plans = known_plans(found.roles, found.machine.target.devices, stages)
    return found.cost, distinct_layouts((str(each), layout_of(found.axes, found.roles, each)) for each in plans)


PROGRAMS = {
    "scan": ("llama-tiny", "v5e:4x4", 1, ""),
    "prefetch": ("llama-tiny", "v5e:4x4", 1, "prefetch"),
    "sequential": ("llama-tiny", "v5e:4x4", 1, "sequential"),
    "pipeline": ("llama-tiny", "v5e:4x4", 2, ""),
    "experts": ("mixtral-tiny", "h100:2x8", 1, ""),
}


@pytest.mark.parametrize("program", PROGRAMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_bound_exceeds_the_time_of_a_step(program, data):
    cost, layouts = drawn_from(*PROGRAMS[program])
    name, chosen = data.draw(st.sampled_from(layouts))
    bounds, time_us = list(cost.least_us(chosen)), cost(chosen).step_time_us
    assert bounds == pytest.approx(sorted(bounds)), name
    assert bounds[-1] <= time_us, name


@pytest.mark.parametrize("program", ["pipeline", "experts"])
def test_bounds_do_not_depend_on_the_layouts_before(program):
    """Classes that move the same values are priced in an order that earlier layouts determine."""

    def last_bounds(reverse):
        cost, layouts = drawn_from.__wrapped__(*PROGRAMS[program])
        return {name: list(cost.least_us(each))[-1] for name, each in (reversed(layouts) if reverse else layouts)}

    assert last_bounds(True) == pytest.approx(last_bounds(False), rel=1e-12)


@pytest.mark.parametrize("program", PROGRAMS)
def test_most_bounds_are_close_to_the_time_of_a_step(program):
    cost, layouts = drawn_from(*PROGRAMS[program])
    shares = [max(cost.least_us(chosen)) / cost(chosen).step_time_us for _, chosen in layouts]
    assert statistics.median(shares) > 0.9


@functools.cache
def branching():
    """A problem whose loop gathers a weight while it computes in a branch, which counts as half a run."""

    def products(x):
        for _ in range(40):
            x = x @ x.mT @ x
        return x

    def sums(weights, rows):
        def layer(x, weight):
            return lax.cond(x[0, 0, 0] > 0, products, lambda x: x, x) @ weight, None

        return lax.scan(layer, rows, weights)[0].sum()

    shapes = jax.ShapeDtypeStruct((8, 2048, 2048), "float32"), jax.ShapeDtypeStruct((16, 256, 2048), "float32")
    return PlanningProblem(trace(sums, shapes, {}, ()), find_machine(None, "v5e:4x4"), None)


@pytest.mark.parametrize("strategy", ["fsdp:16", "dp:4 fsdp:4"])
def test_compute_in_a_branch_hides_as_much_as_it_takes(strategy):
    found = branching()
    chosen = found._requested_layout(strategy)
    assert max(found.cost.least_us(chosen)) <= found.cost(chosen).step_time_us


@pytest.mark.parametrize("program", ["scan", "experts"])
def test_the_last_bound_follows_from_the_collectives(program):
    cost, layouts = drawn_from(*PROGRAMS[program])
    for name, chosen in layouts:
        found = cost(chosen)
        of_operators = [c for c in found.collectives if c.ops is not None]
        hideable = [c for c in of_operators if c.place is not None and is_hidden_on(cost.target.chip, c)]
        hideable_us = sum(c.time_us for c in hideable)
        exposed_us = sum(c.time_us for c in of_operators) - hideable_us
        bound_us = max(cost.least_us(chosen))
        assert bound_us >= (1 - 1e-6) * (exposed_us + max(found.kernels_us, hideable_us)), name
        assert bound_us <= exposed_us + found.kernels_us + hideable_us, name
