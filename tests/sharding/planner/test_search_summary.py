"""The plan's record of its search, of its collectives' times and of its activations."""

import math
from dataclasses import replace
from functools import cache

import pytest

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import Estimate
from autoshard.sharding.report.page.search import search_section, why_not_chosen
from autoshard.sharding.report.search_outcome import plan_counts
from autoshard.sharding.report.summary import exposed_us, local_bytes, mesh_sizes
from tests.sharding.example_step import shapes, train_step


def step(state, batch, *, twice=False):
    state, metrics = train_step(state, batch)
    return train_step(state, batch) if twice else (state, metrics)


@cache
def planned(**options) -> Plan:
    return autoshard.plan(train_step, *shapes(), target="v5e:2x4", donate_argnums=0, **options)


def test_the_counts_of_a_search_add_up():
    plan = planned(memory_limit_bytes=720 * 2**10)
    tried = plan.history[0].tried
    n = plan_counts(plan)
    assert n.proposed == n.alike + n.idle + n.slow + n.known and n.priced == n.known + n.changed == len(tried)
    assert 0 < n.fitting == sum(t.peak_bytes <= 720 * 2**10 for t in tried) < n.priced and n.variants == 1
    story = search_section(plan).split("</p>")[0]
    assert f"{n.priced} plans were priced: {n.known} of {n.proposed} proposed" in story
    assert f"{n.fitting} of the {n.priced} fit 720 KiB, {n.priced - n.fitting} do not" in story


def test_the_names_of_plans_are_explained():
    plan = planned()
    (record,) = plan.history
    assert "<code>dp+vocab</code>" in search_section(plan) and ". All fit " in search_section(plan)
    known = replace(record, tried=tuple(t for t in record.tried if not t.changed))
    section = search_section(replace(plan, history=(known,)))
    assert "named by its strategy" in section and "<code>dp+vocab</code>" not in section


def test_rows_that_tie_say_so():
    plan = planned()
    (record,) = plan.history
    chosen = next(t for t in record.tried if t.strategy == plan.chosen)
    twin = replace(chosen, strategy="twin", step_time_us=plan.estimate.step_time_us * 0.9995)
    section = search_section(replace(plan, history=(replace(record, tried=(*record.tried, twin)),)))
    row = next(row for row in section.split("<tr") if "<b>twin</b>" in row)
    assert ">tie<" in row and "a tie, within 0.1 %" in row and "1.000x" not in row
    assert f"{plan.chosen} is the fastest of those that fit" in section  # up to a tie


def test_every_proposed_plan_is_counted():
    (record,) = planned().history
    known = [t for t in record.tried if not t.changed]
    assert record.proposed == len(known) + record.alike + record.idle + record.slow and record.alike > 0
    tried = {(t.strategy, t.step_time_us, t.peak_bytes) for t in record.tried}
    assert tried >= set(planned().candidates) >= {(t.strategy, t.step_time_us, t.peak_bytes) for t in known}
    assert [t.step_time_us for t in record.tried] == sorted(t.step_time_us for t in record.tried)
    assert len(planned(plan="fsdp:8").history[0].tried) == 1


def test_plans_that_leave_devices_idle_are_counted():
    state, batch = shapes(batch=2, seq=3)  # eight devices for two rows of the batch
    with pytest.warns(AutoshardWarning, match="only 2 of the 8 devices have work of their own"):
        plan = autoshard.plan(train_step, state, batch, target="cpu:8", donate_argnums=0)
    (record,) = plan.history
    left_out = record.alike + record.idle + record.slow
    assert record.idle > 0 and record.proposed == sum(not t.changed for t in record.tried) + left_out


def test_changed_plans_are_recorded_too():
    (record,) = planned().history
    changed = [t for t in record.tried if t.changed]
    assert any("+" in t.strategy for t in changed)
    spreads = [t.strategy for t in changed if "+" not in t.strategy and "-" not in t.strategy]
    assert all("dp:" in name or "zero1:" in name for name in spreads)  # these store state over fewer devices
    assert len({t.strategy for t in record.tried}) == len(record.tried)  # no duplicates
    faster = [t for t in changed if t.step_time_us < planned().estimate.step_time_us * 0.999]
    assert all(why_not_chosen(planned(), t).startswith("faster, but repeats work") for t in faster)


def test_a_page_does_not_call_a_plan_the_fastest_if_a_faster_one_is_listed():
    plan = planned()
    (record,) = plan.history
    slower = tuple(t for t in record.tried if t.step_time_us >= plan.estimate.step_time_us)
    assert "is the fastest of those" in search_section(replace(plan, history=(replace(record, tried=slower),)))
    quicker = replace(record.tried[0], strategy="quicker", step_time_us=plan.estimate.step_time_us / 2, changed=True)
    section = search_section(replace(plan, history=(replace(record, tried=(quicker, *record.tried)),)))
    assert "fastest" not in section.split("</p>")[0] and "the table says why" in section


def test_each_variant_has_its_own_record():
    plan = autoshard.plan(step, *shapes(), target="v5e:2x4", donate_argnums=0, variants={"twice": [False, True]})
    assert [dict(each.variant) for each in plan.history] == [{"twice": False}, {"twice": True}]
    for each, (variant, words, us, peak) in zip(plan.history, plan.variants, strict=True):
        assert dict(each.variant) == dict(variant)
        assert next((t.step_time_us, t.peak_bytes) for t in each.tried if t.strategy == words) == (us, peak)
    assert plan.history[1].tried[0].step_time_us > plan.history[0].tried[0].step_time_us


def test_the_record_is_deterministic_and_survives_json():
    plan, again = planned(), autoshard.plan(train_step, *shapes(), target="v5e:2x4", donate_argnums=0)
    assert (plan.history, plan.traffic_us, plan.activations) == (again.history, again.traffic_us, again.activations)
    read = Plan.from_json(plan.to_json())
    for name in ("history", "traffic_us", "activations", "links", "topology", "candidates"):
        assert getattr(read, name) == getattr(plan, name), name


def test_json_has_one_line_for_each_priced_plan():
    lines = [line.strip() for line in planned().to_json().splitlines()]
    for t in planned().history[0].tried:
        assert any(line.startswith(f'["{t.strategy}", {t.step_time_us}, {t.peak_bytes}, ') for line in lines)
    odd = planned().where(chosen="[\n]", notes=("a [ b\n c ] d", "e"))
    read = Plan.from_json(odd.to_json())
    assert (read.chosen, read.notes) == (odd.chosen, odd.notes)


@pytest.mark.parametrize("words", ["fsdp:8", "fsdp:2 tp:4 seq", "dp:8"])
def test_times_of_collectives_sum_to_the_communication_time_of_the_step(words):
    plan = planned(plan=words)
    assert len(plan.traffic_us) == len(plan.traffic) > 1
    assert sum(us for us, _ in plan.traffic_us) == pytest.approx(plan.estimate.comm_us)
    assert sum(exposed for _, exposed in plan.traffic_us) == pytest.approx(exposed_us(plan))
    assert all(0 <= exposed <= us * (1 + 1e-9) for us, exposed in plan.traffic_us)
    tried = plan.history[0].tried[0]
    assert tried.compute_us == plan.estimate.compute_us and 0 < tried.most_exposed_us <= exposed_us(plan) * (1 + 1e-9)


def test_only_asynchronous_collectives_are_hidden():
    plan = autoshard.plan(train_step, *shapes(batch=4096), target="v5e:2x4", plan="fsdp:8", donate_argnums=0)
    hidden = {
        kind
        for (kind, *_), (us, exposed_us) in zip(plan.traffic, plan.traffic_us, strict=True)
        if us > exposed_us * 1.001
    }
    assert hidden == {"all-gather"}  # the only collective of data parallelism that v5e's compiler makes asynchronous


def test_activations_are_listed_with_axes_and_shardings():
    plan = planned(plan="fsdp:2 tp:4 seq")
    by_axes = {one.axes: one for one in plan.activations if one.role == "activation"}
    inner = by_axes["batch", "seq", "ffn"]
    assert inner.shape == (16, 16, 128) and tuple(inner.spec) == ("fsdp", None, "tp")
    assert inner.line.startswith("/") and "example_step.py" in inner.line and inner.path == "dot_general"
    assert all("batch" in "*".join(one.axes) for one in by_axes.values())
    gradients = [one for one in plan.activations if one.role == "gradient"]
    assert any(one.axes == ("vocab", "embed") and tuple(one.spec) == ("tp", "fsdp") for one in gradients)
    held_bytes = sum(one.held_bytes for one in plan.activations)
    assert 0 < held_bytes <= plan.estimate.memory_bytes["temporary"] * (1 + 1e-9)
    sizes = mesh_sizes(plan)
    tiles = 128 / 16  # upper bound: the sequence has size 16
    assert all(one.held_bytes <= one.count * local_bytes(one, sizes) * tiles for one in by_axes.values())


def test_links_give_kind_and_bandwidth():
    assert planned().links == {"y": ("line", 4.5e10), "x": ("line", 4.5e10)}
    rings = autoshard.plan(train_step, *shapes(batch=64), target="v5p:4x4x4", plan="fsdp:64", donate_argnums=0)
    assert {kind for kind, _ in rings.links.values()} == {"ring"}
    hosts = autoshard.plan(train_step, *shapes(), target="h100:2x4", plan="fsdp:8", donate_argnums=0)
    assert {name: kind for name, (kind, _) in hosts.links.items()} == {"host": "switch", "gpu": "switch"}


LOSERS = [
    (PricedPlan("a", 9.0, 12.0), "does not fit: 2 B over the limit"),
    (PricedPlan("a", 110.0, 9.0, 80.0), "20.0 us more compute"),
    (PricedPlan("a", 110.0, 9.0, 60.0, "all-gather", 40.0), "10.0 us more exposed communication (mostly all-gather)"),
    (PricedPlan("a", 130.0, 9.0, 65.0, "all-gather", 40.0),
     "25.0 us more exposed communication (mostly all-gather) and 5.00 us more compute"),
    (PricedPlan("a", 100.05, 5.0, 60.0, "all-gather", 40.0), "a tie, within 0.1 %"),
    (PricedPlan("a", 99.95, 9.0, 60.0, changed=True), "a tie in time, within 0.1 %"),
    (PricedPlan("a", 100.12, 9.0, 60.06), "0.06 us more compute and 0.06 us more exposed communication"),
    (PricedPlan("a", 90.0, 9.0, 60.0), "faster by the estimate"),
    (PricedPlan("a", 90.0, 9.0, 60.0, changed=True),
     "faster, but does more work than the known plan, or gains too little over it"),
    (PricedPlan("a", 110.0, 9.0), "slower"),
    (PricedPlan("a", math.inf, 9.0), "slower"),
]  # fmt: skip


@pytest.mark.parametrize(("tried", "why"), LOSERS)
def test_why_a_plan_lost(tried, why):
    plan = Plan(mesh=abstract_mesh({}), axis_rules={}, storage={}, inputs=(), outputs=(), target="", limit_bytes=10.0,
                estimate=Estimate(100.0, 60.0, 40.0, 0.0, 5.0), history=(SearchRecord(tried=(tried,)),))  # fmt: skip
    assert why_not_chosen(plan, tried) == why
