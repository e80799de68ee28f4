"""The top of a plan's page: figures with their sources, counts that add up, links."""

import re
from dataclasses import replace

import pytest

from autoshard._units import bytes_text, ratio_text, time_text
from autoshard.sharding.audit import Audit
from autoshard.sharding.plan.search_record import PricedPlan
from autoshard.sharding.report.page import page
from autoshard.sharding.report.page.headline import headline
from autoshard.sharding.report.page.search import why_not_chosen
from autoshard.sharding.report.search_outcome import verdict
from autoshard.sharding.report.summary import collectives, mesh_sizes
from tests.sharding.report.page.elements import texts, visible_rows
from tests.sharding.report.page.plans import PLANS, compiled, offloaded, requested, searched


def cards(html):
    """Return the lines of each card."""
    found = re.findall(r'<div class="card">(.*?)</div>', html)
    return {lines[0]: lines[1:] for lines in ([t for t in re.split("<[^>]*>", card) if t] for card in found)}


def test_figures_of_the_compiled_program_come_first():
    plan = compiled()
    here, shown = plan.estimate, cards(headline(plan))
    source, estimated = "compiled, by the compiler&#x27;s cycles", f"estimated {time_text(here.step_time_us)}"
    assert shown["step time"] == ["1.00 ms", source, estimated, "100 us exposed communication"]
    assert shown["memory per device"][:3] == ["11.0 MiB", "compiled", f"estimated {bytes_text(here.peak_memory_bytes)}"]
    assert shown["traffic per step"][:2] == ["3.00 MiB", "compiled"] and shown["speedup"][1] == "estimated"
    by_roofline = replace(plan.audits[1], compute_us_cycles=None)
    assert "compiled, by a roofline" in cards(headline(plan.where(audits=(by_roofline,))))["step time"]


def test_figures_of_a_plan_that_was_not_compiled_are_estimates():
    plan = searched()
    shown = cards(headline(plan))
    assert shown["step time"][:2] == [time_text(plan.estimate.step_time_us), "estimated"]
    assert {source for _, source, *_ in shown.values()} == {"estimated"}
    other = replace(compiled().audits[0], mesh={"dp": 8})  # an audit of another plan
    assert cards(headline(plan.where(audits=(other,)))) == shown
    assert "which was not run" not in headline(plan) and "which was not run" in headline(compiled())


def test_a_program_that_does_not_compile_is_named_first():
    plan = searched()
    here = plan.estimate
    audit = Audit("oom", mesh=mesh_sizes(plan), peak_bytes=20 * 2**30, predicted_peak_bytes=here.peak_memory_bytes,
                  predicted_step_time_us=here.step_time_us)  # fmt: skip
    html = headline(plan.where(audits=(audit,)))
    assert '<p class="bad">Compiled: the program does not fit the device: it needs 20.0 GiB.</p>' in html
    assert cards(html)["step time"][1] == "estimated"


def test_memory_over_the_limit_is_marked():
    plan = compiled().where(limit_bytes=10 * 2**20)
    assert '<p class="bad">11.0 MiB</p>' in headline(plan)
    assert '<p class="bad">11.0 MiB</p>' not in headline(compiled().where(limit_bytes=12 * 2**20))


def test_the_verdict_counts_all_priced_plans():
    plan = searched()
    priced = [t for each in plan.history for t in each.tried]
    fitting = sum(t.peak_bytes <= plan.limit_bytes for t in priced)
    size = bytes_text(plan.limit_bytes)
    assert 1 < fitting < len(priced)
    words = f"{plan.chosen}, the fastest of {fitting} plans that fit {size} (of {len(priced)})"
    assert verdict(plan).sentence == words
    assert verdict(compiled()).sentence == f"{plan.chosen}, the fastest of 2 that were compiled, of {len(priced)} plans"
    assert verdict(requested()).sentence == "fsdp:2 tp:4 seq, as requested"
    tiny = plan.where(limit_bytes=1.0)
    assert verdict(tiny).sentence == f"{plan.chosen}, the smallest of {len(priced)} plans: none fits 1 B"
    record = plan.history[-1]
    better = PricedPlan("dp+x", plan.estimate.step_time_us / 1.1, 1.0, changed=True)
    close = plan.where(history=(*plan.history[:-1], replace(record, tried=(better, *record.tried))))
    assert verdict(close).sentence.endswith(" except 1 changed, whose gain is small or uncertain")
    limit = plan.limit_bytes
    tight = PricedPlan("dp:8", plan.estimate.step_time_us / 1.01, 0.99 * limit)
    almost = plan.where(history=(*plan.history[:-1], replace(record, tried=(tight, *record.tried))))
    assert verdict(almost).sentence.endswith(" except 1 that almost fills the memory")
    assert "almost fills the memory" in why_not_chosen(almost, tight)
    both = plan.where(history=(*plan.history[:-1], replace(record, tried=(tight, better, *record.tried))))
    assert " except 1 changed, whose gain is small or uncertain and 1 that almost" in verdict(both).sentence
    slow = plan.where(estimate=replace(plan.estimate, step_time_us=plan.estimate.step_time_us * 2))
    assert "chosen from" in verdict(slow).sentence and "fastest" not in verdict(slow).sentence


def test_a_measured_step_time_comes_first():
    plan = searched()
    name = compiled().audits[1].strategy
    measured = plan.where(measured=(("another", 100.0), (name, 2000.0)))
    shown = cards(headline(measured))
    estimated = f"estimated {time_text(plan.estimate.step_time_us)}"
    assert shown["step time"][:3] == ["2.00 ms", "measured, the median of its runs", estimated]
    assert "the fastest of 2 that were run" in verdict(measured).sentence
    assert "Measured, the step takes 2.00 ms instead of" in page(measured)
    assert "Compiled, the step takes 1.00 ms by the compiler" in page(compiled())
    assert cards(headline(plan.where(measured=(("another", 100.0),))))["step time"][1] == "estimated"


def test_the_next_best_plan_can_be_a_tie():
    plan = searched()
    us, peak = plan.estimate.step_time_us, plan.estimate.peak_memory_bytes
    other = plan.where(candidates=((plan.chosen, us, peak), ("twin", us * 1.0009, peak), ("slow", us * 1.5, peak)))
    assert "twin <small>a tie in step time</small>" in headline(other)
    assert f"slow <small>{ratio_text(1.5, 1.0)} the step time</small>" in headline(other)


@pytest.mark.browser
@pytest.mark.parametrize("name", PLANS)
def test_counts_add_up_and_lead_to_their_tables(show, name):
    plan = PLANS[name]()
    page = show(plan)
    items = texts(page, ".counts li")
    for item in items:
        total, _, parts = item.partition(": ")
        numbers = [int(part.split()[0]) for part in parts.partition(";")[0].split(" + ") if part]
        assert not numbers or sum(numbers) == int(total.split()[0]), item
    assert items[0].startswith(f"{len(plan.inputs)} arrays as input: ")
    assert items[1] == f"{len(plan.outputs)} arrays as result"
    moved = len(collectives(plan))
    assert items[2].startswith(f"{moved} collectives ") and moved == len(visible_rows(page, "#moves-list tbody tr"))
    if len(items) > 3:
        assert items[3].startswith(f"{len(visible_rows(page, '#plans-list tbody tr'))} plans priced: ")
    targets = page.run("[...document.querySelectorAll('.counts a')].map((e) => e.getAttribute('href'))")
    assert len(targets) >= 5 and all(page.run(f"document.querySelector('{at}') !== null") for at in targets)


@pytest.mark.browser
def test_a_link_to_a_folded_table_opens_it(show):
    page = show(requested())
    is_open = "document.querySelector('#arrays-optimizer').closest('details').open"
    assert not page.run(is_open)
    page.click(".counts a[href='#arrays-optimizer']")
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run(is_open)


def test_host_memory_is_a_figure_of_its_own():
    plan = offloaded()
    total = bytes_text(plan.estimate.host_memory_bytes)
    assert cards(headline(plan))["host memory"][:2] == [total, "estimated"]
    assert "host memory" not in cards(headline(requested())) and "Host memory" not in page(requested())
