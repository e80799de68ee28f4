"""Search fields, axis buttons and folded parts of a plan's page, in a real browser."""

import pytest

from tests.sharding.report.page.elements import boxes, texts, visible_rows
from tests.sharding.report.page.plans import requested

pytestmark = pytest.mark.browser


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
    rects = boxes(
        page, f"#tensors-list > details:nth-of-type({number + 1}) tbody tr:not([hidden])", "e.checkVisibility()"
    )
    assert rects and all(height > 10 and seen for *_, height, seen in rects)  # the folded row is visible
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
    reasons = texts(page, "#tensors-list > details:first-of-type tbody tr:first-of-type .why")[0]
    assert "shards dimension" in reasons
    page.click("button[data-fold]")
    assert page.run("[...document.querySelectorAll('#tensors-list > details')].every((e) => e.open)")
    page.click("button[data-fold]")
    assert not page.run("[...document.querySelectorAll('#tensors-list > details')].some((e) => e.open)")
