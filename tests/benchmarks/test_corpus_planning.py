"""The profile of planning: which room of the package a function's time counts for."""

from types import SimpleNamespace
from typing import Any

import corpus_planning
import pytest


def test_calls_of_other_packages_count_for_the_room_that_makes_them():
    package = corpus_planning.PACKAGE
    cost, search = ((str(package / room / "a.py"), 1, "f") for room in ("cost", "search/inner"))
    called = {cost: (1, 1, 3.0, 4.0), search: (1, 1, 0.5, 0.5), ("/usr/lib/os.py", 1, "f"): (1, 1, 0.25, 0.25)}
    rows = {cost: (1, 1, 2.0, 5.0, {}), search: (1, 1, 1.0, 1.5, {}), ("numpy.py", 1, "g"): (3, 3, 3.75, 3.75, called)}
    stats: Any = SimpleNamespace(stats=rows)
    found = corpus_planning._by_room(stats)
    assert found == pytest.approx({"cost": 5.0, "search/inner": 1.5, "other packages": 0.25})
