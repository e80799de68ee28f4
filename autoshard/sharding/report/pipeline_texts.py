"""A plan's pipeline, in words: its stages, its schedule, and how much of the time they are idle."""

from __future__ import annotations

from autoshard.sharding.pipeline.schedule_words import make_schedule
from autoshard.sharding.pipeline.schedules import BACKWARD, FORWARD, WEIGHTS
from autoshard.sharding.plan.sharding_plan import ShardingPlan


def pipeline_texts(plan: ShardingPlan) -> list[str]:
    """The stages, the schedule, the microbatches, the ticks in which a stage is idle, and the slots of residuals."""
    schedule = make_schedule(plan.schedule, plan.stages, plan.microbatches)
    forward = schedule.ticks[FORWARD]
    ticks = int(forward.max() - forward.min()) + 1  # of the forward parts; there are as many of the backward parts
    idle = f"{ticks - plan.microbatches * schedule.chunks} of {ticks}"
    waiting = schedule.slots(FORWARD, [part for part in (BACKWARD, WEIGHTS) if part in schedule.ticks]).count
    return [
        f"{plan.stages} stages",
        f"schedule {plan.schedule}",
        f"{plan.microbatches} microbatches",
        f"each stage idle in {idle} forward ticks and {idle} backward ticks",
        f"residuals of {waiting} {'microbatches' if schedule.chunks == 1 else 'chunks'} held",
    ]
