"""A plan's pipeline, in words: its stages, its schedule, and how much of the time they are idle."""

from __future__ import annotations

from autoshard.sharding.pipeline.schedules import FORWARD, SCHEDULES
from autoshard.sharding.plan.sharding_plan import ShardingPlan


def pipeline_texts(plan: ShardingPlan) -> list[str]:
    """The stages, the schedule, the microbatches, the ticks in which a stage is idle, and the slots of what waits."""
    schedule = SCHEDULES[plan.schedule](plan.stages, plan.microbatches)
    ticks = int(schedule.ticks[FORWARD].max()) + 1  # of the forward parts; there are as many of the backward parts
    idle = f"{ticks - plan.microbatches} of {ticks}"
    kept, taken = schedule.kept
    waiting = schedule.slots(FORWARD, taken).count
    return [
        f"{plan.stages} stages",
        f"schedule {plan.schedule}",
        f"{plan.microbatches} microbatches",
        f"each stage idle in {idle} forward ticks and {idle} backward ticks",
        f"{kept} of {waiting} microbatches held",
    ]
