"""Ranks an expert's programs by the planner's estimate of the same strategies, where only a few can be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from estimate import find_target
from expert_plans import Case
from plan_rows import Planned

from autoshard.sharding.planner.strategy_prices import StrategyPrices
from autoshard.train.program.build import workload_step

MOST_OVER = 1.1  # chosen: programs whose estimated peak exceeds the memory by this factor are left out


def most_promising(case: Case, programs: Sequence[Planned], count: int) -> list[Planned]:
    """Return the programs with the fastest estimates of those whose estimated memory fits, the fastest first."""
    limit = find_target(case.target).chip.memory_bytes * MOST_OVER
    priced: list[tuple[float, Planned]] = []

    def variant(one: Planned) -> tuple[str, int]:
        return one.remat, one.microbatches

    for (remat, microbatches), some in groupby(sorted(programs, key=variant), key=variant):
        group = list(some)
        step, *shapes = workload_step(case.variant(remat), microbatches)
        prices = StrategyPrices(step, tuple(shapes), target=case.target, donate_argnums=(0,)).of(
            dict.fromkeys(one.words for one in group if one.words)
        )
        priced += [
            (prices[one.words].step_time_us, one)
            for one in group
            if one.words in prices and prices[one.words].peak_memory_bytes <= limit
        ]
    return [one for _, one in sorted(priced, key=lambda pair: pair[0])[:count]]
