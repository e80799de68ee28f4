"""A plan's pipeline, in words: its stages, its schedule, and how much of the time they are idle."""

from __future__ import annotations

import itertools

from autoshard._columns import columns
from autoshard.sharding.pipeline.schedule_words import make_schedule
from autoshard.sharding.pipeline.schedules import BACKWARD, FORWARD, WITH_RESIDUALS
from autoshard.sharding.plan.sharding_plan import ShardingPlan


def waiting_lines(plan: ShardingPlan) -> list[str]:
    """Return lines with the number of microbatches that wait on the first stage in each tick.

    The first stage holds the most. One line is for stages that keep residuals, one for stages that keep their inputs.
    There are no lines if the stages of the plan keep residuals.
    """
    other = WITH_RESIDUALS.get(plan.schedule)
    if plan.stages == 1 or other is None:
        return []
    found = {}
    for word in (other, plan.schedule):
        schedule = make_schedule(word, plan.stages, plan.microbatches)
        kept, taken = schedule.kept
        found[f"{kept}, {word}"] = schedule.live(FORWARD, taken)[:, 0].tolist()
    counts = [*zip(*found.values(), strict=True)]
    steps = [tuple(b - a for a, b in zip(one, next_, strict=True)) for one, next_ in itertools.pairwise(counts)]
    turns = [0, *(t for t in range(1, len(steps)) if steps[t] != steps[t - 1]), len(counts) - 1]
    rows = [["tick", *map(str, turns)], *([name, *(str(held[t]) for t in turns)] for name, held in found.items())]
    return ["microbatches that wait on the first stage:", *columns(rows, range(1, len(turns) + 1))]


def pipeline_texts(plan: ShardingPlan) -> list[str]:
    """The stages, the schedule, the microbatches, the ticks in which a stage is idle, and the slots of what waits."""
    schedule = make_schedule(plan.schedule, plan.stages, plan.microbatches)
    forward = schedule.ticks[FORWARD]
    ticks = int(forward.max() - forward.min()) + 1  # of the forward parts; there are as many of the backward parts
    idle = f"{ticks - plan.microbatches * schedule.chunks} of {ticks}"
    if BACKWARD not in schedule.ticks:
        return [
            f"{plan.stages} stages",
            f"schedule {plan.schedule}: the layers on stages have no gradients",
            f"{plan.microbatches} microbatches",
            f"each stage idle in {idle} ticks",
        ]
    kept, taken = schedule.kept
    waiting = schedule.slots(FORWARD, taken).count
    return [
        f"{plan.stages} stages",
        f"schedule {plan.schedule}",
        f"{plan.microbatches} microbatches",
        f"each stage idle in {idle} forward ticks and {idle} backward ticks",
        f"{kept} of {waiting} {'microbatches' if schedule.chunks == 1 else 'chunks'} held",
    ]
