"""Plans beyond the known ones: words that change a plan, and the local search."""

import dataclasses
import math

import jax
import pytest

from autoshard import Plan, plan
from autoshard.errors import PlanRequestError
from autoshard.models import workload
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_edits import Change, changed
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.machines.device_mesh import find_machine
from autoshard.sharding.planner.planning import PlanningProblem
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.search import layout_search, local_search
from autoshard.sharding.search.candidate import price
from autoshard.sharding.search.local_search import shards_alike, single_changes, specs_of_values
from autoshard.train.program.build import workload_step
from tests.sharding.axes.rows import test_dispatched_rows as dispatched
from tests.sharding.cost.test_equivalence_classes import problem
from tests.sharding.search.test_layout_search import train_step

TINY = workload("llama-tiny")


def tiny(words):
    return plan(*workload_step(TINY), target="cpu:8", plan=words, donate_argnums=0)


def test_words_are_parsed_and_printed_unchanged():
    for text in ("dp:2 tp:4 seq tp-ffn dp+optimizer", "my-axis=fsdp:8", "my-axis=fsdp:8 my-axis+vocab my-axis_1-a+b"):
        assert str(parse_request(text)) == text
    assert parse_request("my-axis=fsdp:8 my-axis+vocab").changes == (Change("my-axis", True, "vocab"),)


def test_a_removed_axis_stays_whole():
    before, after = tiny("dp:4 tp:2 seq"), tiny("dp:4 tp:2 seq tp-ffn")
    assert "ffn" in before.axis_rules["tp"] and "ffn" not in after.axis_rules["tp"]
    spec = {leaf.path: leaf.spec for leaf in after.inputs}
    assert not any("tp" in str(spec[path]) for path in spec if path.endswith(("w_up", "w_gate", "w_down")))
    assert any("tp" in str(spec[path]) for path in spec if path.endswith("wq"))


def test_an_added_role_is_stored_over_the_axis():
    before, after = tiny("dp:2 fsdp:4"), tiny("dp:2 fsdp:4 dp+optimizer")
    assert before.storage == {"parameter": ("fsdp",), "optimizer": ("fsdp",)}
    assert after.storage == {"parameter": ("fsdp",), "optimizer": ("dp", "fsdp")}
    assert after.estimate.peak_memory_bytes < before.estimate.peak_memory_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dp:8 tp-ffn", "the mesh has no axis 'tp'; it has dp"),
        ("dp:2 tp:4 tp-fnn", "no logical axis 'fnn'.*Did you mean 'tp-ffn'?"),
        ("dp:2 tp:4 dp+batch", "'dp' already shards batch; leave the word out"),
        ("dp:2 tp:4 dp-optimizer", "'dp' does not store optimizer; leave the word out"),
    ],
)
def test_changes_that_are_not_possible(words, message):
    with pytest.raises(PlanRequestError, match=message):
        tiny(words)


def with_few_rows(words: str | None = None) -> Plan:
    """A GPT whose batch has a quarter as many rows as there are devices."""
    work = workload("gpt-1.3b").with_(batch_size=16)
    config = dataclasses.replace(work.config, layers=8, remat="full")
    step, state, batch = workload_step(dataclasses.replace(work, config=config))
    return plan(step, state, batch, target="v5e:8x8", plan=words, donate_argnums=0)


@pytest.mark.parametrize("words", ["dp:4 tp:2 seq", "fsdp:8"])
def test_changes_that_shard_alike_have_the_same_price(words):
    planning, start = problem(), problem()._requested_layout(words)
    before = price(words, start, planning.cost, planning.memory)
    specs, gains = specs_of_values(start), {True: 0, False: 0}
    for change in single_changes(start):
        after = changed(start, change)
        alike = shards_alike(start, after, specs)
        now = price(f"{words} {change}", after, planning.cost, planning.memory)
        same = (now.cost.step_time_us, now.peak_bytes) == (before.cost.step_time_us, before.peak_bytes)
        assert same or not alike, change
        gains[alike] += 1
        anew = Layout(after.axes, after.roles, after.mesh, after.table, after.storage)
        assert all(anew.spec_of(leaves) == spec for leaves, spec in after.known_specs.items()), change
    assert all(gains.values()), "some changes shard alike, others do not"


def climbed(times: dict[str, float], work: dict[str, float], most_us: list[float] | None = None) -> list[str]:
    """The changed plans that are found where plans take these times and do this work; all others are slow."""
    planning = problem()

    def with_time(words: str, layout: Layout, bound: float = math.inf):
        if most_us is not None:
            most_us.append(bound)
        found = price(words, layout, planning.cost, planning.memory)
        us, compute = times.get(words, 1000.0), work.get(words, 1.0)
        step = dataclasses.replace(found.cost, step_time_us=us, compute_us=compute, comm_us=1.0, comm_bytes=1.0)
        return dataclasses.replace(found, cost=step)

    known = [with_time(words, planning._requested_layout(words)) for words in times if "-" not in words]
    return [c.name for c in local_search.hill_climb(known, with_time, math.inf)]


TIMES = {"dp:8": 100.0, "dp:2 tp:4": 110.0, "tp:8": 160.0, "dp:4 tp:2": 170.0}
CHANGED = {"dp:2 tp:4 tp-ffn": 90.0, "tp:8 tp-ffn": 70.0, "tp:8 tp-ffn tp-vocab": 50.0, "dp:4 tp:2 tp-ffn": 80.0}


def test_changes_that_gain_are_tried_on_every_other_mesh():
    """`tp:8` is no start: it is slow without the change. The search goes on from there, and `dp:8` has no axis tp."""
    bounds: list[float] = []
    assert climbed(TIMES | CHANGED, {}, bounds) == ["tp:8 tp-ffn tp-vocab"]
    assert min(bounds) == pytest.approx(50.0 * (1 - local_search.LEAST_CHANGE_GAIN))


def test_a_changed_plan_of_another_mesh_does_no_more_work_than_its_own_start():
    start = {"dp:2 tp:4": 9.0, "dp:2 tp:4 tp-ffn": 9.0}
    assert climbed(TIMES | CHANGED, start | {"tp:8 tp-ffn": 1.2}) == ["dp:4 tp:2 tp-ffn"]


@pytest.mark.slow
def test_the_best_mesh_with_a_change_is_found_where_it_is_not_the_best_without():
    """Of 16 devices, `ep:16` is third, and 21 % faster than every known plan if it does not shard the batch."""
    planned = plan(*workload_step(workload("mixtral-tiny")), target="h100:2x8", donate_argnums=0)
    fastest = min(us for name, us, _ in planned.candidates if "-" not in name)
    assert planned.chosen == "ep:16 ep-batch" and planned.estimate.step_time_us < 0.8 * fastest


@pytest.mark.slow
def test_a_changed_plan_can_be_requested(monkeypatch):
    named = with_few_rows()
    assert "+" not in named.chosen and "-" not in named.chosen  # a changed plan gains less than the threshold
    for module in (local_search, layout_search):
        monkeypatch.setattr(module, "LEAST_GAIN_OVER_KNOWN", 0.05)
    plan = with_few_rows()
    assert "+" in plan.chosen or "-" in plan.chosen
    assert plan.estimate.step_time_us < 0.95 * named.estimate.step_time_us
    requested = with_few_rows(plan.chosen)
    assert requested.estimate == plan.estimate
    assert [leaf.spec for leaf in requested.inputs] == [leaf.spec for leaf in plan.inputs]


@pytest.mark.parametrize(
    ("name", "target"), [("gpt-tiny", "h100:8"), pytest.param("mixtral-tiny", "v5e:2x4", marks=pytest.mark.slow)]
)
def test_no_work_is_repeated_to_save_communication(name, target):
    planned = plan(*workload_step(workload(name).with_(batch_size=4)), target=target, donate_argnums=0)
    assert "-" not in planned.chosen  # for a model this small, repeated work would be faster


def test_the_result_is_never_slower_than_a_known_plan():
    planned = plan(*train_step(), target="h100:8", donate_argnums=0)
    assert (
        planned.estimate.step_time_us
        <= min(us for _, us, peak in planned.candidates if peak <= planned.limit_bytes) + 1e-3
    )


@pytest.mark.slow
def test_the_search_ends_where_all_changes_together_gain_too_little(monkeypatch):
    """It still makes the first round of changes, and finds the same plan as a search that goes on."""

    def search(gains):
        monkeypatch.setattr(local_search, "GAINS_TOGETHER", gains)
        step, state, batch = workload_step(workload("wide-resnet-tiny").with_(batch_size=16))
        return plan(step, state, batch, target="v5e:2x4", donate_argnums=0)

    short, long = search(0.0), search(math.inf)
    counts = [sum(tried.changed for tried in each.history[0].tried) for each in (short, long)]
    assert 0 < counts[0] < counts[1] and short.chosen == long.chosen


def test_the_experts_of_a_router_are_among_the_changes():
    made = trace(dispatched.step, jax.eval_shape(dispatched.values), {})
    problem = PlanningProblem(made, find_machine(None, "cpu:8"), None)
    changes = {str(change) for change in single_changes(problem._requested_layout("dp:2 ep:4"))}
    assert {"ep-router", "dp+router"} <= changes
