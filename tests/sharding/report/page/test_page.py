"""A plan's page in a real browser: sizes, colours and positions match the plan's numbers."""

import itertools
import json
import math
from dataclasses import replace
from functools import cache

import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._units import bytes_text, line_text, time_text, variant_text
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.report.page import page
from autoshard.sharding.report.summary import exposed_us, mesh_sizes
from tests.browser import NAMES, Browser, chromium
from tests.sharding.example_step import shapes, train_step

pytestmark = pytest.mark.browser

WIDE, NARROW = 1280, 390
EVIL = "<script>window.evil = 1</script>&\"'"


def step(state, batch, *, twice=False):
    """Run the example's step once or twice."""
    state, metrics = train_step(state, batch)
    return train_step(state, batch) if twice else (state, metrics)


@cache
def searched() -> Plan:
    """Search the plans of two variants on a torus, some of which do not fit."""
    plan = autoshard.plan(step, *shapes(), target="v5e:2x4", donate_argnums=0, variants={"twice": [False, True]})
    peaks = sorted(t.peak_bytes for each in plan.history for t in each.tried)
    return plan.where(limit_bytes=max(peaks[len(peaks) * 2 // 3], plan.estimate.peak_memory_bytes))


@cache
def requested() -> Plan:
    """Request a plan with two mesh axes that shard parameters, activations and storage."""
    plan = autoshard.plan(train_step, *shapes(), plan="fsdp:2 tp:4 seq", target="v5p:2x2x2", donate_argnums=0)
    return plan.where(
        placing={"fsdp": (("x", 2, 1),), "tp": (("y", 2, 1), ("z", 2, 1))}
    )  # not in the order of the devices


@cache
def large() -> Plan:
    """Make a plan of 80 unrolled layers, with names that are HTML."""
    plan = requested()
    layers = [
        replace(leaf, path=f"{tree}/layers/{n}/{leaf.path}", role=role)
        for tree, role in (("params", "parameter"), ("mu", "optimizer"), ("nu", "optimizer"))
        for n in range(80)
        for leaf in plan.inputs
        if leaf.role == "parameter"
    ]
    odd = [
        Leaf(f"params/odd/{n}", (2 * n + 2, 8), "float32", P("fsdp"), ("embed", f"odd/{n}:1"), "parameter")
        for n in range(300)
    ]
    evil = Leaf(f"params/{EVIL}", (8,), "float32", P(), (f"{EVIL}:0",), "parameter")
    wordy = replace(layers[0], path=f"params/{'Transformer_' * 6}0/{'MultiHeadAttention_' * 4}", shape=(32, 8, 8))
    line = f"/somewhere/models/{'experts_' * 5}.py:231:2 (Experts._by_sorting.<locals>.<lambda>)"
    made = [replace(one, line=line, path="ragged_dot_general") for one in plan.activations]
    return plan.where(inputs=(*layers, *odd, wordy, evil), outputs=tuple(layers), activations=tuple(made),
                      traffic=tuple((*row[:3], line) for row in plan.traffic),
                      function=EVIL, chosen=EVIL, notes=(EVIL,))  # fmt: skip


PLANS = {"searched": searched, "requested": requested, "large": large}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = chromium()
    if path is None:
        pytest.fail(f"AUTOSHARD_BROWSER=required, but there is no browser: none of {', '.join(NAMES)} is on PATH")
    with Browser(path, tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture(scope="module")
def show(browser, tmp_path_factory):
    """Return a function that opens a plan's page: `show(plan, width, dark=True)`."""
    folder, number = tmp_path_factory.mktemp("pages"), itertools.count()

    def opened(plan: Plan, width: int = WIDE, dark: bool = False):
        file = folder / f"{next(number)}.html"
        file.write_text(page(plan), encoding="utf-8")
        return browser.open(file, width, dark=dark)

    return opened


@pytest.fixture(scope="module")
def shown(show):
    """Return the page of a plan by name, shared by tests that do not change it."""
    return cache(lambda name: show(PLANS[name]()))


def boxes(page, selector, *more):
    """Return `[x, y, width, height, ...]` of all elements of a selector, with further expressions of `e`."""
    parts = ", ".join(["r.x", "r.y", "r.width", "r.height", *more])
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => {{ const r = e.getBoundingClientRect(); "
        f"return [{parts}]; }})"
    )


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText.trim())")


def visible_rows(page, selector):
    """Return the texts of rows that are not hidden, including folded ones."""
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter((e) => !e.hidden).map((e) => e.textContent)"
    )


# requests, errors, width


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", PLANS)
def test_the_page_makes_no_request_and_fits_the_window(show, name, width):
    page = show(PLANS[name](), width)
    assert len(page.requests) == 1 and page.requests[0].startswith("file:")
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert page.run("document.documentElement.scrollWidth") == width
    over = page.run(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('pre, [aria-hidden=true]') && "
        "getComputedStyle(e).clipPath === 'none' && !e.closest('thead') && "
        f"e.getBoundingClientRect().right > {width} + 0.5).map((e) => e.outerHTML.slice(0, 200))"
    )
    assert over == []
    clipped = page.run(
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
        ".map((e) => e.textContent.slice(0, 100))"
    )
    assert clipped == []  # no table needs scrolling
    assert page.console == page.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(show, dark):
    """All text has a contrast of at least 4.5, as WCAG requires for small text."""
    page = show(searched(), WIDE, dark)
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert page.run(CONTRAST) == []


CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const seen = new Map();
  const colour = (text) => { if (!seen.has(text)) seen.set(text, rgba(text)); return seen.get(text); };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const behind = (e) => {
    if (!e) return [255, 255, 255];
    const own = colour(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(e.parentElement));
  };
  const light = (c) => { const [r, g, b] = c.map((v) => v / 255).map((v) =>
    v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const faint = [];
  for (const e of document.querySelectorAll('main *, .plane text')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length) continue;
    const isDevice = e.matches('.plane text');
    const back = isDevice ? over(colour(getComputedStyle(e.previousElementSibling).fill), [0, 0, 0]) : behind(e);
    const text = over(colour(getComputedStyle(e)[isDevice ? 'fill' : 'color']), back);
    const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push([((a + 0.05) / (b + 0.05)).toFixed(2), e.outerHTML.slice(0, 120)]);
  }
  return faint;
})()"""


def test_controls_and_drawings_have_accessible_names(shown):
    """Every control and drawing has a name in the accessibility tree."""
    page = shown("searched")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    kinds = {"button", "link", "image", "searchbox", "combobox", "heading", "DisclosureTriangle", "region"}
    assert [role for role, name in named if role in kinds and not name] == []
    assert {"button", "link", "image", "searchbox", "combobox", "heading", "region"} <= {role for role, _ in named}
    labels = [name for role, name in named if role == "image"]
    assert any(label.startswith("memory per device: ") for label in labels)
    assert sum(label.startswith("mesh axis ") for label in labels) == len(searched().mesh.axis_names)


def test_names_from_programs_cannot_run_as_scripts(show):
    page = show(large())
    assert page.run("window.evil === undefined && document.scripts.length === 1")
    assert EVIL in page.run("document.title") and EVIL in texts(page, "h1")[0]
    page.write("input[data-for=tensors-list]", "window.evil")
    assert any(EVIL in row for row in visible_rows(page, "#tensors-list tbody tr"))
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.evil = 1\">')")
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run("window.evil === undefined")  # the policy blocks even an unescaped name
    assert page.requests[1:] == page.blocked != []


# mesh


@pytest.mark.parametrize("name", ["searched", "requested"])
def test_each_mesh_axis_is_drawn_on_the_machine(shown, name):
    plan, page = PLANS[name](), shown(name)
    sizes = mesh_sizes(plan)
    assert texts(page, ".panel figcaption") == [f"{axis} {n}" for axis, n in sizes.items()]
    for number, (axis, size) in enumerate(sizes.items(), 1):
        panel = f".panel:nth-of-type({number})"
        found = boxes(page, f"{panel} rect[data-d]", "+e.dataset.d", "e.dataset.g", "e.classList.contains('on')")
        assert len(found) == plan.mesh.size and all(w > 10 and h > 10 for _, _, w, h, *_ in found)
        assert len({(x, y) for x, y, *_ in found}) == plan.mesh.size  # no two overlap
        group = {d: g for *_, d, g, _ in found}
        assert [d for *_, d, _, on in found if on] == [d for d in group if group[d] == group[0]]
        assert set(map(list(group.values()).count, group.values())) == {size}
        places = dict(zip(plan.device_order, itertools.product(*map(range, sizes.values())), strict=True))
        k = list(sizes).index(axis)
        for a, b in itertools.combinations(group, 2):  # in one group: equal coordinates on every other axis
            same = places[a][:k] + places[a][k + 1 :] == places[b][:k] + places[b][k + 1 :]
            assert (group[a] == group[b]) == same
        numbers = texts_of(page, f"{panel} .plane text")
        assert [int(n) for n in numbers] == [places[d][k] for *_, d, _, _ in found]


def texts_of(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")


def test_devices_are_drawn_as_in_the_topology(shown):
    plan, page = requested(), shown("requested")  # z, y, x of 2 each
    assert [size for _, size in plan.topology] == [2, 2, 2]
    found = {d: (x, y) for x, y, _, _, d in boxes(page, ".panel:first-of-type rect[data-d]", "+e.dataset.d")}
    assert found[1][0] > found[0][0] and found[1][1] == found[0][1]  # x runs to the right
    assert found[2][1] > found[0][1] and found[2][0] == found[0][0]  # y runs down
    assert found[4][0] > found[1][0] + 20  # the next plane of z is to the right
    assert texts(page, ".panel:first-of-type .plane > span") == ["z 0", "z 1"]
    assert len(boxes(page, ".panel:first-of-type .plane path")) == 2 * (2 + 2)  # links along x and y of both planes


def test_hovering_over_a_device_shows_its_groups(show):
    plan, page = requested(), show(requested())
    page.point('.panel:nth-of-type(2) rect[data-d="6"]')
    order, sizes = plan.device_order, list(mesh_sizes(plan).values())
    places = list(itertools.product(*map(range, sizes)))
    mine = places[order.index(6)]
    for k, axis in enumerate(plan.mesh.axis_names):
        group = {order[i] for i, p in enumerate(places) if p[:k] + p[k + 1 :] == mine[:k] + mine[k + 1 :]}
        found = boxes(page, f".panel:nth-of-type({k + 1}) rect.on", "+e.dataset.d")
        assert {d for *_, d in found} == group, axis
    assert "Groups of device 6: " in texts(page, "#device")[0]


# logical axes


def colours(page, selector):
    """Return the text colours of each logical axis."""
    found = page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => [e.title, getComputedStyle(e).color])"
    )
    made: dict[str, set[str]] = {}
    for name, colour in found:
        made.setdefault(name, set()).add(colour)
    return made


@pytest.mark.parametrize("name", PLANS)
def test_each_axis_has_its_own_colour(shown, name):
    page = shown(name)
    legend = colours(page, "#axes-list button")
    assert all(len(found) == 1 for found in legend.values())
    if name != "large":  # hundreds of axes cannot all have distinct colours
        assert len({min(found) for found in legend.values()}) == len(legend)
    named = [legend[axis] for axis in ("batch", "seq", "heads", "ffn", "vocab", "embed")]
    assert len({min(found) for found in named}) == 6
    for row in ("Parameters", "Activations", "Optimizer state"):
        number = next(i for i, t in enumerate(texts(page, "#tensors-list > details > summary")) if t.startswith(row))
        found = colours(page, f"#tensors-list > details:nth-of-type({number + 1}) .axis")
        assert len(found) >= 4 and all(legend[axis] == used for axis, used in found.items())


def test_sharded_dimensions_are_filled_and_name_their_mesh_axis(shown):
    page = shown("requested")
    rows = page.run(
        "[...document.querySelectorAll('#tensors-list > details:first-of-type tbody tr')].map((e) => "
        "[e.querySelector('code').textContent, [...e.querySelectorAll('.dim')].map((d) => "
        "[d.querySelector('.axis').className.split(' ').slice(0, 2).join(' '), d.textContent])])"
    )
    up = dict(rows)["mlp/up"]
    assert up[0] == ["axis part", "embed 32fsdp 2"] and up[1] == ["axis on", "ffn 128tp 4"]
    made = texts(page, "#tensors-list .axis.on")
    assert "batch 16" in made and "seq 16" in made


# memory and time


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
        found = boxes(page, f"#time .bar .k-{kind}:not(.hid)")
        assert sum(w for _, _, w, _ in found) == pytest.approx(us * per_us, abs=1.5), kind
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


# search


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
        start = f"{t.words} ({variant_text(plan.history[n].variant)}): "
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


def test_the_search_says_why_other_plans_were_not_chosen(shown):
    plan, page = searched(), shown("searched")
    rows = visible_rows(page, "#plans-list tbody tr")
    assert len(rows) == sum(len(each.tried) for each in plan.history)
    assert "chosen" in rows[0] and not any("chosen" in row for row in rows[1:])
    for each in plan.history:
        for t in each.tried:
            row = next(r for r in rows if r.startswith(t.words + variant_text(each.variant)))
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


# searching and folding


def test_typing_hides_rows_that_do_not_match(show):
    page = show(requested())
    field = "input[data-for=tensors-list]"
    everything = len(visible_rows(page, "#tensors-list tbody tr"))
    folded = page.run("[...document.querySelectorAll('#tensors-list > details')].map((e) => e.open)")
    page.write(field, "MOMENTS mlp")
    rows = visible_rows(page, "#tensors-list tbody tr")
    assert 0 < len(rows) < everything and all("moments" in r and "mlp" in r for r in rows)
    assert texts(page, "label:has([data-for=tensors-list]) output") == [f"{len(rows)} of {everything}"]
    number = next(i for i, t in enumerate(texts(page, "#tensors-list > details > summary")) if "Optimizer" in t)
    found = boxes(
        page, f"#tensors-list > details:nth-of-type({number + 1}) tbody tr:not([hidden])", "e.checkVisibility()"
    )
    assert found and all(height > 10 and seen for *_, height, seen in found)  # the folded row is visible
    page.write(field, "")
    assert len(visible_rows(page, "#tensors-list tbody tr")) == everything
    assert page.run("[...document.querySelectorAll('#tensors-list > details')].map((e) => e.open)") == folded


def test_clicking_an_axis_shows_the_tensors_that_have_it(show):
    page = show(requested())
    button = "#axes-list button[title=heads]"
    everything = len(visible_rows(page, "#tensors-list tbody tr"))
    page.click(button)
    rows = visible_rows(page, "#tensors-list tbody tr")
    assert 0 < len(rows) < everything and all("heads" in row for row in rows)
    assert page.run(f"document.querySelector('{button}').ariaPressed") == "true"
    page.click(button)
    assert len(visible_rows(page, "#tensors-list tbody tr")) == everything


def test_folded_parts_open_and_close_by_a_click(show):
    page = show(requested())
    rest = "#moves-list details"
    for is_open in (False, True, False):
        assert boxes(page, f"{rest} tbody tr", "e.checkVisibility()")[0][4] == is_open
        page.click(f"{rest} summary")
    page.click("#tensors-list > details:first-of-type tbody tr:first-of-type summary")
    why = texts(page, "#tensors-list > details:first-of-type tbody tr:first-of-type .why")[0]
    assert "shards dimension" in why
    page.click("button[data-fold]")
    assert page.run("[...document.querySelectorAll('#tensors-list > details')].every((e) => e.open)")
    page.click("button[data-fold]")
    assert not page.run("[...document.querySelectorAll('#tensors-list > details')].some((e) => e.open)")


def test_links_lead_to_every_section(shown):
    page = shown("searched")
    ids = page.run("[...document.querySelectorAll('nav a')].map((e) => e.getAttribute('href').slice(1))")
    assert ids == page.run("[...document.querySelectorAll('main > section')].map((e) => e.id)")
    assert {"mesh", "axes", "time", "memory", "search", "collectives", "tensors"} <= set(ids)


def test_a_plan_of_two_thousand_arrays_is_fast(show):
    page = show(large())
    took = page.run("(() => { const t = performance.getEntriesByType('navigation')[0]; return t.domComplete; })()")
    assert took < 3000
    field = "input[data-for=tensors-list]"
    spent = page.run(
        f"(() => {{ const e = document.querySelector('{field}'), t = performance.now(); e.value = 'layers/41/'; "
        "e.dispatchEvent(new Event('input')); return performance.now() - t; })()"
    )
    assert spent < 1000
    paths = page.run("[...document.querySelectorAll('#tensors-list tr:not([hidden]) .paths li:not([hidden])')]"
                     ".map((e) => e.textContent)")  # fmt: skip
    assert len(paths) >= 24 and all("layers/41/" in path for path in paths)
    assert page.run("document.querySelectorAll('#tensors-list > details[open]').length") >= 2
