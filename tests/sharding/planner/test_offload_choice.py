"""`offload="auto"`."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard import plan
from autoshard.errors import PlanError
from autoshard.sharding.planner.offload_choice import trial_words
from tests.sharding.offload.steps import arguments, step_of


def planned(**options: Any) -> Any:
    return plan(step_of("scan"), *arguments(), plan="dp:8", donate_argnums=(0, 1), **options)


def test_what_fits_without_offload_stays() -> None:
    made = planned(offload="auto")
    assert not made.offload
    assert any(note.startswith("offload='auto' compared none (") and note.endswith("chose none") for note in made.notes)


def test_what_does_not_fit_is_offloaded() -> None:
    whole, moved = planned(), planned(offload="residual+hidden+optimizer")
    least = moved.estimate.peak_memory_bytes
    limit = (whole.estimate.peak_memory_bytes + least) / 2
    assert least < whole.estimate.peak_memory_bytes
    made = planned(offload="auto", memory_limit_bytes=limit)
    assert made.offload and made.fits


def test_without_a_fitting_plan_the_least_memory_is_reported() -> None:
    with pytest.raises(PlanError, match="does not fit"):
        planned(offload="auto", memory_limit_bytes=1000)


def test_order_of_the_trials() -> None:
    sizes = {"a": 1.0, "b": 3.0, "residual": 2.0, "optimizer": 9.0, "c": 2.0, "d": 0.5}
    trials = trial_words(sizes)
    assert trials == [
        ("residual",),
        ("residual", "b"),
        ("residual", "b", "c", "a", "d"),
        ("optimizer",),
        ("residual", "optimizer"),
        ("residual", "b", "c", "a", "d", "optimizer"),
    ]
    assert trial_words({"optimizer": 1.0}) == [("optimizer",)] and trial_words({}) == []
