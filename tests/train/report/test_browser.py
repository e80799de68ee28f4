"""The page of a run in a real browser: requests, width, contrast, names, the values under the pointer."""

import re

import pytest

from autoshard.train.report.page import write_report
from tests.page_checks import faint_texts, overflows
from tests.train.report.runs import EVIL, failed_first, finished, long, troubled

pytestmark = pytest.mark.browser
WIDE, NARROW = 1280, 400
KINDS = {"finished": finished, "troubled": troubled, "failed": failed_first, "long": lambda path: long(path, 5000)}


@pytest.fixture(scope="module")
def show(browser, tmp_path_factory):
    """Return a function that opens the page of a kind of run: `show("finished", width, dark=True)`."""
    files = {}

    def opened(kind, width=WIDE, dark=False):
        if kind not in files:
            folder = KINDS[kind](tmp_path_factory.mktemp("runs") / kind)
            files[kind] = folder / "report.html"
            write_report(folder)
        return browser.open(files[kind], width, dark=dark)

    return opened


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_makes_no_request_and_fits_the_window(show, kind, width):
    page = show(kind, width)
    assert len(page.requests) == 1 and page.requests[0].startswith("file:")
    assert overflows(page, width) == []
    assert page.console == page.errors == []
    assert page.run("window.evil === undefined && document.scripts.length === 2")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(show, dark):
    assert faint_texts(show("troubled", WIDE, dark)) == []


def test_links_lead_to_every_section_and_drawings_have_names(show):
    page = show("troubled")
    ids = page.run("[...document.querySelectorAll('nav a')].map((e) => e.getAttribute('href').slice(1))")
    assert ids == page.run("[...document.querySelectorAll('main > section')].map((e) => e.id)")
    assert ids[:3] == ["loss", "optimizer", "throughput"] and {"goodput", "history", "plan", "settings"} <= {*ids}
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    labels = [name for role, name in named if role == "image"]
    assert all(labels)
    assert any(label.startswith("loss, nats per token by step: training ") for label in labels)
    assert any(label.startswith("time by cause, of ") for label in labels)


def test_pointing_at_a_chart_shows_the_values_of_a_step(show):
    page = show("finished")
    page.point("#loss .plot")  # its middle is between steps 1 and 60
    text = page.run("document.querySelector('#loss output').textContent")
    found = re.fullmatch(r"step (\d+): training ([\d.]+), held-out ([\d.]+) \(step (20|40)\)", text)
    assert found and 29 <= int(found[1]) <= 32, text
    assert page.run("!document.querySelector('#loss .cross').hidden")
    page.point("h1")
    assert page.run("document.querySelector('#loss output').textContent") == ""


def test_curves_and_marks_are_drawn(show):
    page = show("troubled")
    boxes = page.run("[...document.querySelectorAll('#loss path')].map((e) => e.getBoundingClientRect().width)")
    assert len(boxes) == 3 and min(boxes[:2]) > 900  # the held-out loss is one point
    assert page.run("document.querySelectorAll('#loss .when').length") == 3 + 3  # attempts after the first; incidents
    assert page.run("document.querySelectorAll('#loss .dot').length") == 1
    assert EVIL in page.run("document.querySelector('#history').textContent")


def test_the_plan_of_a_run_can_be_searched(show):
    page = show("finished")
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    page.write("input[data-for=tensors-list]", "no such tensor")
    assert page.run("document.querySelectorAll('#tensors-list tbody tr:not([hidden])').length") == 0
