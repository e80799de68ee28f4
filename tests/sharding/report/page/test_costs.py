"""Costs on a plan's page, in a real browser: bars have the sizes of the plan's numbers."""

import pytest

from autoshard._units import bytes_text, line_text, time_text
from autoshard.sharding.report.summary import exposed_us, mesh_sizes
from tests.sharding.report.page.elements import boxes, texts, visible_rows
from tests.sharding.report.page.plans import PLANS, offloaded, requested, searched

pytestmark = pytest.mark.browser


def test_memory_is_drawn_to_scale_with_the_limit(shown):
    plan, page = searched(), shown("searched")
    kinds = {k: v for k, v in plan.estimate.memory_bytes.items() if v}
    whole = boxes(page, "#memory .bar")[0]
    for kind in ("parameter", "optimizer", "temporary"):
        _, _, width, height = boxes(page, f"#memory .bar .k-{kind}")[0]
        expected = whole[2] * kinds[kind] / max(plan.limit_bytes, plan.estimate.peak_memory_bytes)
        assert width == pytest.approx(expected, abs=1.5) and height > 10
    mark = boxes(page, "#memory .mark")[0]
    assert mark[0] == pytest.approx(whole[0] + whole[2], abs=3) and mark[3] > 10
    text = texts(page, "#memory")[0]
    assert bytes_text(plan.limit_bytes) in text and bytes_text(plan.estimate.peak_memory_bytes) in text


def test_little_memory_is_also_drawn_enlarged(show, shown):
    plan = requested()  # less than 1 MiB of 95.7 GiB
    assert plan.estimate.peak_memory_bytes < plan.limit_bytes / 1000
    page = shown("requested")
    whole, parts = boxes(page, "#memory .bar")[1], boxes(page, "#memory .bar .k-temporary")
    share = plan.estimate.memory_bytes["temporary"] / plan.estimate.peak_memory_bytes
    assert parts[1][2] == pytest.approx(whole[2] * share, abs=1.5)
    large = show(plan.where(limit_bytes=plan.estimate.peak_memory_bytes * 2))
    assert len(boxes(large, "#memory .bar")) == 1


def test_memory_of_a_plan_that_does_not_fit_exceeds_the_mark(show):
    plan = requested()
    page = show(plan.where(limit_bytes=plan.estimate.peak_memory_bytes / 2))
    (x, _, width, _), mark = boxes(page, "#memory .bar")[0], boxes(page, "#memory .mark")[0]
    assert mark[0] == pytest.approx(x + width / 2, abs=2)
    assert "over the limit" in texts(page, "#memory .bad")[0]


@pytest.mark.parametrize("name", ["searched", "requested"])
def test_time_is_drawn_to_scale_by_kind(shown, name):
    plan, page = PLANS[name](), shown(name)
    estimate, whole = plan.estimate, boxes(page, "#time .bar")[0]
    per_us = whole[2] / estimate.step_time_us
    compute = boxes(page, "#time .bar .k-compute")[0]
    assert compute[2] == pytest.approx(estimate.compute_us * per_us, abs=1.5)
    kinds = {kind for kind, *_ in plan.traffic}
    exposed = {
        k: sum(w for (kind, *_), (_, w) in zip(plan.traffic, plan.traffic_us, strict=True) if kind == k) for k in kinds
    }
    assert sum(exposed.values()) == pytest.approx(exposed_us(plan), rel=1e-6)
    for kind, us in exposed.items():
        rects = boxes(page, f"#time .bar .k-{kind}:not(.hid)")
        assert sum(w for _, _, w, _ in rects) == pytest.approx(us * per_us, abs=1.5), kind
    last = max(x + w for x, _, w, _ in boxes(page, "#time .lanes .bar:last-of-type span"))
    assert last == pytest.approx(whole[0] + whole[2], abs=2)  # exposed traffic ends with the step
    rows = texts(page, "#time tbody tr")
    assert all(any(row.startswith(kind) and time_text(us) in row for row in rows) for kind, us in exposed.items())


def test_every_collective_is_listed_with_its_source_line(shown):
    plan, page = requested(), shown("requested")
    rows = visible_rows(page, "#moves-list tbody tr")
    assert len(rows) > 12
    for kind, axes, _, line in plan.traffic:
        tags = "".join(f"{a} {mesh_sizes(plan)[a]}" for a in axes.split())
        assert any(r.startswith(kind + tags) and r.endswith(line_text(line)) for r in rows), (kind, axes, line)
    shown_bytes = [size for _, _, size, _ in plan.traffic]
    bars = [w for _, _, w, _ in boxes(page, "#moves-list > .scroll .bar > span")]
    assert len(bars) == 12 and bars == sorted(bars, reverse=True)
    assert bars[0] == pytest.approx(boxes(page, "#moves-list .bar")[0][2], abs=1) and max(shown_bytes) > 0


def test_traffic_that_compute_hides_has_a_legend(shown):
    plan = searched()
    has_hidden = any(us > exposed * 1.001 for us, exposed in plan.traffic_us)
    legend = texts(shown("searched"), "#time .legend")
    assert legend == (["Traffic of any kind:\npale: hidden by compute\nfull: exposed"] if has_hidden else [])


def test_the_sum_of_times_is_not_called_the_step(shown):
    plan, page = searched(), shown("searched")
    estimate = plan.estimate
    row = texts(page, "#time tbody tr")[-1]
    assert row.startswith("sum") and time_text(estimate.compute_us + estimate.comm_us) in row
    assert f"so the step takes {time_text(estimate.step_time_us)}" in texts(page, "#time")[0]


@pytest.mark.parametrize(("place", "count"), [("#tensors .legend", 3), ("#search .legend", 3)])
def test_bars_of_two_colours_have_a_legend(shown, place, count):
    page = shown("searched")
    keys = page.run(f"[...document.querySelectorAll('{place} .key')].map((e) => getComputedStyle(e).backgroundColor)")
    drawn = page.run(f"[...new Set([...document.querySelectorAll('{place.split()[0]} .bar > span')]"
                     ".map((e) => getComputedStyle(e).backgroundColor))]")  # fmt: skip
    assert len(keys) == count and set(drawn) == set(keys)


def test_host_memory_has_a_bar_of_its_own(shown):
    plan, page = offloaded(), shown("offloaded")
    text = texts(page, "#memory")[0]
    total = plan.estimate.host_memory_bytes
    assert "Host memory per device" in text and bytes_text(total) in text
    whole = boxes(page, "#memory .bar")[2]
    state, rest = boxes(page, "#memory h3 ~ .bar > span")
    assert state[2] == pytest.approx(whole[2] * 2 / 3, abs=1.5) and rest[2] == pytest.approx(whole[2] / 3, abs=1.5)
    rows = texts(page, "#memory h3 ~ .scroll tbody tr")
    assert [row.split()[0] for row in rows] == ["optimizer", "temporary", "host"]
    assert any("host memory" in row for row in visible_rows(page, "#arrays-optimizer tbody tr"))
    assert not any("host memory" in row for row in visible_rows(page, "#arrays-parameter tbody tr"))
