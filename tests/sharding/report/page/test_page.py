"""A plan's page in a real browser: requests, width, contrast, accessible names, links, speed."""

import pytest

from tests.sharding.report.page.elements import texts, visible_rows
from tests.sharding.report.page.plans import EVIL, NARROW, PLANS, WIDE, large, searched

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", PLANS)
def test_the_page_makes_no_request_and_fits_the_window(show, name, width):
    page = show(PLANS[name](), width)
    assert len(page.requests) == 1 and page.requests[0].startswith("file:")
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert page.run("document.documentElement.scrollWidth") == width
    too_wide = page.run(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('pre, [aria-hidden=true]') && "
        "getComputedStyle(e).clipPath === 'none' && !e.closest('thead') && "
        f"e.getBoundingClientRect().right > {width} + 0.5).map((e) => e.outerHTML.slice(0, 200))"
    )
    assert too_wide == []
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
    milliseconds = page.run(
        f"(() => {{ const e = document.querySelector('{field}'), t = performance.now(); e.value = 'layers/41/'; "
        "e.dispatchEvent(new Event('input')); return performance.now() - t; })()"
    )
    assert milliseconds < 1000
    paths = page.run("[...document.querySelectorAll('#tensors-list tr:not([hidden]) .paths li:not([hidden])')]"
                     ".map((e) => e.textContent)")  # fmt: skip
    assert len(paths) >= 24 and all("layers/41/" in path for path in paths)
    assert page.run("document.querySelectorAll('#tensors-list > details[open]').length") >= 2
