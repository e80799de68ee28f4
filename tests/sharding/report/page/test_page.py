"""A plan's page in a real browser: requests, width, contrast, accessible names, links, speed."""

import pytest

from tests.page_checks import faint_texts, overflows
from tests.sharding.report.page.elements import texts, visible_rows
from tests.sharding.report.page.plans import EVIL, NARROW, PLANS, WIDE, large, searched

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", PLANS)
def test_the_page_makes_no_request_and_fits_the_window(show, name, width):
    page = show(PLANS[name](), width)
    assert len(page.requests) == 1 and page.requests[0].startswith("file:")
    assert overflows(page, width) == []
    assert page.console == page.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(show, dark):
    """All text has a contrast of at least 4.5, as WCAG requires for small text."""
    page = show(searched(), WIDE, dark)
    assert faint_texts(page) == []


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
