"""Why a plan was chosen: the counts of the plans that the search priced, and the reason for the choice.

All reports take their counts from here: those of all variants, the plans that local search made among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard._units import bytes_text, ratio_text
from autoshard.sharding.plan.memory_doubt import almost_fills, usable_bytes_of
from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.constants import ALTERNATIVE_TIE
from autoshard.sharding.report.summary import devices

RIVALS_SHOWN = 3


@shown
@dataclass(frozen=True)
class PlanCounts:
    """How many plans the search proposed, left out and priced, over all variants.

    Attributes:
        proposed: Plans that the search began with; `known + alike + idle + slow`.
        alike: Those with the same layout as another.
        idle: Those with an idle mesh axis.
        slow: Those that are slower than others in any case, so that they were not priced.
        known: Those that were priced.
        changed: Further plans that local search made and priced.
        fitting: Priced plans that fit the memory limit.
        variants: Variants of the step.
    """

    proposed: int
    alike: int
    idle: int
    slow: int
    known: int
    changed: int
    fitting: int
    variants: int

    @property
    def priced(self) -> int:
        """All priced plans."""
        return self.known + self.changed


def plan_counts(plan: ShardingPlan) -> PlanCounts:
    """Count the plans of the search."""
    history = history_of(plan)
    names = "proposed", "alike", "idle", "slow"
    proposed, alike, idle, slow = (sum(getattr(h, name) for h in history) for name in names)
    tried = [each for h in history for each in h.tried]
    changed, limit = sum(t.changed for t in tried), plan.limit_bytes or math.inf
    fitting = sum(t.peak_bytes <= limit for t in tried)
    return PlanCounts(proposed, alike, idle, slow, len(tried) - changed, changed, fitting, len(history))


def is_fastest(plan: ShardingPlan) -> bool:
    """Whether no plan that fits is faster by the estimate, ties aside."""
    return not _faster(plan)


def _faster(plan: ShardingPlan) -> list[PricedPlan]:
    """The plans that fit and are faster by the estimate, ties aside."""
    limit, here = plan.limit_bytes or math.inf, plan.estimate.step_time_us
    tried = (t for h in history_of(plan) for t in h.tried if t.peak_bytes <= limit)
    return [t for t in tried if t.step_time_us < here and not is_tie(plan, t.step_time_us)]


def is_tie(plan: ShardingPlan, step_time_us: float) -> bool:
    """Whether a step time equals that of the plan, within the error of the estimate."""
    return abs(step_time_us - plan.estimate.step_time_us) <= ALTERNATIVE_TIE * plan.estimate.step_time_us


def ratio_or_tie(plan: ShardingPlan, step_time_us: float) -> str:
    """A step time as a multiple of that of the plan: `1.25x`, or `tie`."""
    return "tie" if is_tie(plan, step_time_us) else ratio_text(step_time_us, plan.estimate.step_time_us)


def history_of(plan: ShardingPlan) -> Sequence[SearchRecord]:
    """The plan's history, or one made of its candidates if it has none."""
    if plan.history:
        return plan.history
    return [SearchRecord(plan.variant, len(plan.candidates), tried=tuple(PricedPlan(*c) for c in plan.candidates))]


@shown
@dataclass(frozen=True)
class Verdict:
    """Why the plan was chosen: a sentence, and the next best plans as (strategy, ratio of step times, peak bytes)."""

    sentence: str
    rivals: tuple[tuple[str, str, float], ...]


def verdict(plan: ShardingPlan) -> Verdict:
    """Why the plan was chosen over the others, with the number of all plans that were priced."""
    return Verdict(_sentence(plan), _rivals(plan))


def _sentence(plan: ShardingPlan) -> str:
    name, counts, size = plan.chosen or "this plan", plan_counts(plan), bytes_text(plan.limit_bytes or math.inf)
    compiled = [audit for audit in plan.audits if audit.ok]
    fits_compiled = any((audit.peak_bytes or 0) <= (plan.limit_bytes or math.inf) for audit in compiled)
    misfit = f"fits {size} as compiled, not by the estimate" if fits_compiled else f"does not fit {size}"
    if plan.fits_device and not plan.fits_host:
        misfit = f"does not fit the {bytes_text(plan.host_limit_bytes)} of host memory of a device"
    if all(tried.strategy == plan.chosen for record in history_of(plan) for tried in record.tried):
        sentence = f"{name}, as requested" if plan.chosen and devices(plan) > 1 else name
        return sentence if plan.fits else f"{sentence}; it {misfit}"
    if not plan.fits:
        smallest = f"the smallest of {counts.priced} plans: none fits {size}"
        return f"{name}, {f'which {misfit}' if counts.fitting or fits_compiled else smallest}"
    if len(compiled) > 1:
        return f"{name}, the fastest of {len(compiled)} that were compiled, of {counts.priced} plans"
    if len(plan.measured) > 1:
        return f"{name}, the fastest of {len(plan.measured)} that were run, of {counts.priced} plans"
    among = f"{counts.priced} plans"
    if counts.fitting < counts.priced:
        among = f"{counts.fitting} plans that fit {size} (of {counts.priced})"
    faster, usable = _faster(plan), usable_bytes_of(plan)
    changed = sum(tried.changed for tried in faster)
    tight = sum(not tried.changed and almost_fills(tried.peak_bytes, usable) for tried in faster)
    if faster and changed + tight == len(faster):
        parts = [f"{changed} changed, whose gain is small or uncertain"] if changed else []
        parts += [f"{tight} that almost fill{'s' * (tight == 1)} the memory"] if tight else []
        return f"{name}, the fastest of {among} except {' and '.join(parts)}"
    return f"{name}, {'chosen from' if faster else 'the fastest of'} {among}"


def _rivals(plan: ShardingPlan) -> tuple[tuple[str, str, float], ...]:
    """The fastest other plans of the chosen variant that fit; of all, if none fits."""
    others = [c for c in plan.candidates if c[0] != plan.chosen]
    fitting = [c for c in others if c[2] <= (plan.limit_bytes or math.inf)]
    different = {(c[1], c[2]): c for c in sorted(fitting or others, key=lambda c: c[1], reverse=True)}
    best = sorted(different.values(), key=lambda c: c[1])[:RIVALS_SHOWN]  # two names can mean one layout
    return tuple((c[0], ratio_text(c[1], plan.estimate.step_time_us), c[2]) for c in best)
