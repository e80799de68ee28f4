"""The fastest plan of each kind that the search priced, and whether the estimate can decide between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard._columns import wrap
from autoshard._shown import shown
from autoshard._units import percent_text, ratio_text, variant_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.report.search_outcome import history_of
from autoshard.sharding.search.constants import KIND_ERROR
from autoshard.sharding.search.strategy_kinds import kind_of


@shown
@dataclass(frozen=True)
class BestOfKind:
    """The fastest plan of one kind that fits the memory.

    Attributes:
        strategy: its strategy, such as "fsdp:8"; `plan=` takes it.
        variant: the static keywords of its variant; empty where there are none.
        step_time_us: estimated time of a step, in microseconds.
        peak_bytes: estimated peak memory of a device, in bytes.
        ratio: its step time over that of the chosen plan.
    """

    strategy: str
    variant: Mapping[str, Any]
    step_time_us: float
    peak_bytes: float
    ratio: float


def best_of_kinds(plan: ShardingPlan) -> dict[str, BestOfKind]:
    """Return the fastest plan of each kind that fits, by kind, the fastest first; see `strategy_kinds`.

    Plans that local search changed are left out, except the chosen one: the search rejects those with small gains.
    """
    limit, here = plan.limit_bytes or math.inf, plan.estimate.step_time_us
    rows = [
        (tried, record.variant)
        for record in history_of(plan)
        for tried in record.tried
        if not tried.changed or tried.strategy == plan.chosen
    ]
    found: dict[str, BestOfKind] = {}
    for tried, variant in sorted(rows, key=lambda row: row[0].step_time_us):
        if tried.peak_bytes <= limit and (kind := kind_of(tried.strategy)):
            ratio = tried.step_time_us / here if here else math.nan
            found.setdefault(kind, BestOfKind(tried.strategy, variant, tried.step_time_us, tried.peak_bytes, ratio))
    return found


def kind_lines(plan: ShardingPlan) -> list[str]:
    """Return lines on the best plan of each other kind, and on the kinds that the estimate cannot tell apart."""
    chosen = kind_of(plan.chosen)
    others = {kind: best for kind, best in best_of_kinds(plan).items() if kind != chosen}
    if not others:
        return []
    here = plan.estimate.step_time_us
    texts = [
        f"{kind} {best.strategy}{f' ({variant_text(best.variant)})' if _differs(best, plan) else ''} "
        f"{ratio_text(best.step_time_us, here)}"
        for kind, best in others.items()
    ]
    lines = wrap("fastest of other kinds: ", texts)
    close = [kind for kind, best in others.items() if best.ratio <= 1 + KIND_ERROR]
    if close and not plan.audits and not plan.measured:
        error = percent_text(KIND_ERROR, 1.0)
        lines.append(f"closer than the estimate's error of {error}: {', '.join(close)}; verify='auto' decides")
    return lines


def _differs(best: BestOfKind, plan: ShardingPlan) -> bool:
    return dict(best.variant) != dict(plan.variant)
