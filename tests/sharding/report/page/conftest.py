"""Pages of plans in a browser."""

import itertools
from functools import cache

import pytest

from autoshard.sharding.api.plan import Plan
from autoshard.sharding.report.page import page
from tests.sharding.report.page.plans import PLANS, WIDE


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
