"""How the fastest of several plans is chosen: by the estimate, by the compiler, or by running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.autotune.compiled_time import fastest_compiled
from autoshard.sharding.autotune.constants import OVER_LIMIT, SETTLING_S
from autoshard.sharding.autotune.measured_time import fastest_measured
from autoshard.sharding.autotune.settling import settled
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.shortlist import Shortlist, fastest_of_all
from autoshard.sharding.planner.variants import PlannedVariant, fastest

AUTO, SCHEDULE = "auto", "schedule"
WORDS = (AUTO, SCHEDULE)  # values of `verify` that are no numbers


@shown
@dataclass(frozen=True)
class Selection:
    """How the plan is chosen among those that were priced.

    Attributes:
        shortlist: how the best candidates are compared; None to choose by the estimate, or to settle the kinds.
        settling_s: seconds for the compilations that settle which kind is the fastest; 0 for no such comparison.
        code: whether the plan that is settled gets machine code.
        attached: whether the plan is for the attached devices.
        variants: whether the program has variants. Without variants, the shortlist applies within its search.
    """

    shortlist: Shortlist | None = None
    settling_s: float = 0.0
    code: bool = True
    attached: bool = True
    variants: bool = False

    @property
    def within(self) -> Shortlist | None:
        """The shortlist that applies within the search of each program."""
        return None if self.variants else self.shortlist

    @property
    def discards(self) -> bool:
        """Whether `choose` may discard plans. The warnings of plans then wait for the choice."""
        return self.variants or self.settling_s > 0

    def choose(self, made: Sequence[PlannedVariant], replan: Callable[[BoundPlan, str], BoundPlan | None]) -> BoundPlan:
        """Return the plan of the best variant.

        Args:
            made: the variants, each with its plan.
            replan: plans the program of a plan again under another strategy; returns None if that raises an error.
        """
        if self.settling_s:
            return settled(made, replan, self.settling_s, self.attached, self.code)
        if self.shortlist and self.variants:
            return fastest_of_all(made, self.shortlist, replan)
        return fastest(made)


def requested_selection(options: Mapping[str, Any], variants: bool) -> Selection:
    """Return the selection that the options `verify=`, `verify_timeout_s=` and `measure=` request.

    Args:
        options: the checked options of a plan.
        variants: whether the program has variants.
    """
    verify, measure, attached = options.get("verify", 0), options.get("measure", 0), options.get("target") is None
    if verify in WORDS:
        seconds = options.get("verify_timeout_s") or SETTLING_S
        return Selection(None, seconds, verify != SCHEDULE, attached, variants)
    if measure:
        return Selection(Shortlist(measure, fastest_measured), variants=variants)
    if not verify:
        return Selection(variants=variants)
    return Selection(Shortlist(verify, fastest_compiled, OVER_LIMIT if verify > 1 else ()), variants=variants)
