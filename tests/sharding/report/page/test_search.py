"""The search on a plan's page, in a real browser: the chart, the reasons, the variants."""

import itertools
import math

import pytest

from autoshard._units import bytes_text, variant_text
from tests.sharding.report.page.elements import boxes, texts, visible_rows
from tests.sharding.report.page.plans import searched

pytestmark = pytest.mark.browser


def test_the_chart_shows_time_against_memory(shown):
    plan, page = searched(), shown("searched")
    points = boxes(page, ".plot .pt", "e.title", "e.className")
    tried = [(n, t) for n, each in enumerate(plan.history) for t in each.tried]
    assert 20 < len(points) <= len(tried)
    won = [p for p in points if "won" in p[5]]
    assert len(won) == 1 and won[0][4].startswith(f"{plan.chosen} ({variant_text(plan.variant)}): ")
    assert won[0][4].endswith("; chosen")
    _, _, width, height = boxes(page, ".plot")[0]
    assert width > 600 and height > 300
    by_title = {p[4]: (p[0] + p[2] / 2, p[1] + p[3] / 2) for p in points}
    placed = []
    for n, t in tried:
        start = f"{t.strategy} ({variant_text(plan.history[n].variant)}): "
        placed += [(t, *by_title[title]) for title in by_title if title.startswith(start)]
    assert len(placed) == len(points)
    for a, b in itertools.pairwise(sorted(placed, key=lambda p: p[0].peak_bytes)):
        assert b[1] >= a[1] - 1  # more memory, further to the right
    for a, b in itertools.pairwise(sorted(placed, key=lambda p: p[0].step_time_us)):
        assert b[2] <= a[2] + 1  # more time, further up
    (a, xa, _), (b, xb, _), (c, xc, _) = (sorted(placed, key=lambda p: p[1])[i] for i in (0, len(placed) // 2, -1))
    logs = [math.log(t.peak_bytes) for t in (a, b, c)]
    assert (xb - xa) / (xc - xa) == pytest.approx((logs[1] - logs[0]) / (logs[2] - logs[0]), abs=0.02)
    limit = boxes(page, ".plot .beyond")[0][0]
    assert all((x > limit) == (t.peak_bytes > plan.limit_bytes) for t, x, _ in placed if abs(x - limit) > 1)


def test_the_search_shows_why_other_plans_were_not_chosen(shown):
    plan, page = searched(), shown("searched")
    rows = visible_rows(page, "#plans-list tbody tr")
    assert len(rows) == sum(len(each.tried) for each in plan.history)
    assert "chosen" in rows[0] and not any("chosen" in row for row in rows[1:])
    for each in plan.history:
        for t in each.tried:
            row = next(r for r in rows if r.startswith(t.strategy + variant_text(each.variant)))
            if t.peak_bytes > plan.limit_bytes:
                assert f"does not fit: {bytes_text(t.peak_bytes - plan.limit_bytes)} over the limit" in row
            elif t.step_time_us > plan.estimate.step_time_us * 1.001:
                assert "more compute" in row or "more exposed communication (mostly " in row, row
    counted = {name: sum(getattr(each, name) for each in plan.history) for name in ("proposed", "alike")}
    text = texts(page, "#search")[0]
    assert f"of {counted['proposed']} proposed" in text and f"{counted['alike']} with the layout of another" in text
    assert all(variant_text(v) in text for v, *_ in plan.variants)


def test_hovering_over_a_plan_shows_its_details(show):
    page = show(searched())
    page.point(".plot .pt.won")
    assert texts(page, "#point")[0].startswith(searched().chosen)


def test_one_variant_can_be_selected(show):
    plan, page = searched(), show(searched())
    before = len(boxes(page, ".plot .pt:not([hidden])"))
    page.run("(() => { const e = document.querySelector('#variant'); e.value = 'v1'; "
             "e.dispatchEvent(new Event('change')); })()")  # fmt: skip
    titles = page.run("[...document.querySelectorAll('.plot .pt:not([hidden])')].map((e) => e.title)")
    assert 0 < len(titles) < before and all(variant_text(plan.history[1].variant) in title for title in titles)
    assert len(visible_rows(page, "#plans-list tbody tr")) == len(plan.history[1].tried)
