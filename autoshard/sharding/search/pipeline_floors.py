"""Gives up the search of a pipeline if no plan of it can be fast enough.

A search compares pipelines with a plan without stages, and that plan is usually faster. Lower bounds of the known plans
(`PipelineTime`) show this before any pipeline is priced. `state_spread` and `local_search` change the fastest known
plans. Changed plans have no bounds, so they are given up together with the known ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from autoshard.sharding.cost.step_time import CostModel
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.plan_request import CONTEXT, is_request, layout_of, parse_request
from autoshard.sharding.layout.sequence_words import sequence_variants
from autoshard.sharding.microbatches.replicas import axes_of_groups
from autoshard.sharding.microbatches.too_slow import TooSlow
from autoshard.sharding.search.time_floors import Race


def check_in_time(
    layouts: Sequence[tuple[str, Layout]],
    cost: CostModel,
    microbatches: int,
    stages: int,
    most_us: float,
    slow: set[str],
) -> None:
    """Check that some plan of a pipeline may take at most `most_us` microseconds.

    More microbatches leave less idle time, but no other work becomes less. So they do not help a plan that takes too
    long even without its idle ticks.

    Args:
        layouts: the known plans of the program, as (strategy, layout).
        cost: the model that prices them.
        microbatches: the number of microbatches.
        stages: the number of stages.
        most_us: an upper bound of the step time in microseconds. Slower plans are not needed.
        slow: strategies that are too slow with this and every larger number of microbatches. The check leaves them out,
            and adds to them if it raises.

    Raises:
        TooSlow: no plan can.
    """
    enough_us = most_us * (microbatches + stages - 1) / microbatches
    tried = [each for each in layouts if each[0] not in slow]
    race = Race([least_us(*each, cost, microbatches, stages) for each in tried])
    complete: dict[str, float] = {}
    while (plan := race.leader()) and plan.least_us <= enough_us:
        if race.is_complete():
            if plan.least_us <= most_us:
                return
            complete[tried[plan.number][0]] = plan.least_us
    slow |= {name for name, _ in tried} - complete.keys()
    if tried or slow:
        raise TooSlow(min(complete.values(), default=enough_us), is_final=not complete)


def least_us(name: str, layout: Layout, cost: CostModel, microbatches: int, stages: int) -> Iterator[float]:
    """Yield lower bounds of the time of a step of a pipeline in microseconds, from low to high; see `PipelineTime`.

    Args:
        name: the strategy.
        layout: its layout.
        cost: the model that prices it.
        microbatches: the number of microbatches.
        stages: the number of stages.
    """
    requested = parse_request(name) if is_request(name) else None
    shards_sequence = requested is not None and any(kind in CONTEXT for kind in requested.kinds.values())

    @cache
    def ways() -> list[Layout]:
        assert requested is not None
        words = sequence_variants(layout.axes, requested)
        found = (replace(parse_request(each), fixed_mesh=requested.fixed_mesh) for each in words)
        return [replace(layout_of(layout.axes, layout.roles, each), storage={}) for each in found]

    return cost.least_of_pipelines_us(
        layout,
        ways if shards_sequence else None,
        ticks=microbatches + 2 * stages,
        has_groups=math.prod(axes_of_groups(name, gathers_once=True).values()) > 1,
    )
