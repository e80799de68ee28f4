"""A browser, and pages of plans in it."""

import itertools
from functools import cache

import pytest

from autoshard.sharding.api.plan import Plan
from autoshard.sharding.report.page import page
from tests.browser import NAMES, Browser, chromium
from tests.sharding.report.page.plans import PLANS, WIDE


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    path = chromium()
    if path is None:
        pytest.fail(f"AUTOSHARD_BROWSER=required, but there is no browser: none of {', '.join(NAMES)} is on PATH")
    with Browser(path, tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running


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
