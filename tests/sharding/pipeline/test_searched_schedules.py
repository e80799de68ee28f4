"""Which pipeline a search takes, from the figures of the plans that it compares."""

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.errors import PlanError
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.pipeline.choice import (
    plan_of_pipelines,
    plan_with_pipelines,
    requested_stage_counts,
    stage_counts,
)
from autoshard.sharding.pipeline.schedule_words import SEARCHED


def made(time: float, stages: int = 1, schedule: str = "") -> Any:
    """Return a bound plan that takes some time."""

    def where(**changes: Any) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(**(vars(plan) | changes)))

    estimate = SimpleNamespace(step_time_us=time, peak_memory_bytes=1e9, compute_us=10.0)
    plan = SimpleNamespace(
        estimate=estimate,
        limit_bytes=0.0,
        usable_bytes=0.0,
        fits=True,
        notes=(),
        stages=stages,
        schedule=schedule,
        chosen=f"pp:{stages}",
        microbatches=8,
    )
    return SimpleNamespace(plan=plan, where=where)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"1f1b": 90, "interleaved:2": 80, "interleaved:4": 79}, "interleaved:2"),  # one more per cent is no gain
        ({"1f1b": 90, "interleaved:2": 95}, "1f1b"),
        ({"1f1b": 110, "interleaved:2": 50}, ""),  # not tried
    ],
)
def test_chunks_are_tried_where_a_pipeline_pays(times, chosen):
    asked = []

    def staged(count, schedule, number, most_us):
        schedule = schedule or "1f1b"
        asked.append((count, schedule))
        if schedule not in times:
            raise PlanError("auto_shard(step): there are too few layers")
        return made(times[schedule] + 5 * (count == 4), count, schedule)

    best = plan_with_pipelines([2, 4], 8, lambda: made(100), staged).plan
    assert best.schedule == chosen and best.stages == (2 if chosen else 1)
    assert asked == [(2, "1f1b"), (4, "1f1b"), *((2, word) for word in SEARCHED if chosen)]
    assert {"ftb", "1f1b-inputs"}.isdisjoint(SEARCHED), "they are never faster"
    assert not chosen or ("interleaved:4" in times) != ("pp:2 interleaved:4 is not possible: there" in best.notes[-1])


def test_a_requested_schedule_takes_the_fastest_number_of_stages_that_fits():
    def staged(count):
        if count == 8:
            raise PlanError("auto_shard(step): there are too few layers")
        return made({2: 90, 4: 80}[count], count, "ftb")

    best = plan_of_pipelines("step", "ftb", [2, 4, 8], staged).plan
    assert best.stages == 4
    assert "compared pp:2 (90.0 us" in best.notes[-1] and "pp:8 is not possible: there are too few" in best.notes[-1]
    with pytest.raises(PlanError, match="schedule 'ftb' needs a pipeline, but pp:8 is not possible: there are too few"):
        plan_of_pipelines("step", "ftb", [8], staged)
    with pytest.raises(PlanError, match=r"but there is one device only; leave out schedule="):
        plan_of_pipelines("step", "ftb", [], staged)


@pytest.mark.parametrize(
    ("target", "counts"), [("cpu:8", [2, 4, 8]), ("v5e:16x16", [2, 4, 8, 16]), ("v5e:4x4*2", [2]), ("cpu:1", [])]
)
def test_stages_of_a_requested_schedule(target, counts):
    assert requested_stage_counts(find_target(target)) == counts


def test_stages_fill_an_axis_of_a_mesh_that_the_plan_keeps():
    target = find_target("v5e:4x4*4")
    assert stage_counts(target) == [2, 4]
    assert stage_counts(target, {"data": 2, "model": 32}) == [2] and stage_counts(target, {"data": 64}) == []
    assert requested_stage_counts(target, {"one": 1, "data": 2, "model": 32}) == [2, 32]
