"""Of several plans the best: by what the target's compiler makes of them, or over variants of one program.

A variant is a choice of static keywords: what layers keep for their backward pass, how many microbatches a batch is
processed in. Each is traced and planned; they are compared as candidates of one plan are, by time among what fits.
Which are planned is told by the values of each keyword, or step by step by a function of what was found so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard._units import variant_text
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.search_summary import of_variants

Made = tuple[dict[str, Any], BoundPlan]


@shown
@dataclass(frozen=True)
class Attempt:
    """What became of a variant.

    Attributes:
        keywords: the variant.
        fits: whether its plan fits the memory; not so where it could not be planned.
        step_time_us: estimated time of a step; infinite where it could not be planned.
        peak_memory_bytes: estimated peak on a device; infinite where it could not be planned.
        limit_bytes: what a device has.
    """

    keywords: Mapping[str, Any]
    fits: bool
    step_time_us: float
    peak_memory_bytes: float
    limit_bytes: float


Next = Callable[[Sequence[Attempt]], Sequence[Mapping[str, Any]]]
Variants = Mapping[str, Sequence[Any]] | Next


def variant_rounds(variants: Variants | None, attempts: Sequence[Attempt]) -> Iterator[list[dict[str, Any]]]:
    """The variants to plan, round by round.

    Args:
        variants: the values of each keyword, all combinations of which are one round; or a function from what became
            of the variants so far, at first none, to those to try next. Nothing new ends it.
        attempts: what became of them; it grows while this is iterated over.

    Raises:
        TypeError: variants are neither.
    """
    if not variants:
        yield [{}]
        return
    if isinstance(variants, Mapping):
        for name, values in variants.items():
            if not isinstance(name, str):
                raise TypeError(f"variants: {name!r:.60} is no keyword; give {{keyword: values}}")
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise TypeError(f"variants: {name!r} is {values!r:.60}; give a list of its values")
        yield [dict(zip(variants, values, strict=True)) for values in itertools.product(*variants.values())]
        return
    if not callable(variants):
        raise TypeError(f"variants are {{keyword: values}} or a function of what was tried, not {variants!r:.60}")
    tried: list[dict[str, Any]] = []
    while True:
        new: list[dict[str, Any]] = []
        for choice in _asked(variants(tuple(attempts))):
            if not any(_same(choice, other) for other in tried):
                tried.append(choice)
                new.append(choice)
        if not new:
            return
        yield new


def _asked(found: Any) -> list[dict[str, Any]]:
    """What a function of attempts returned, as keywords."""
    each = None if isinstance(found, Mapping | str) or not isinstance(found, Iterable) else list(found)
    if each is None or not all(isinstance(one, Mapping) for one in each):
        raise TypeError(f"variants returned {found!r:.60}: return a list of {{keyword: value}}, empty at the end")
    return [dict(one) for one in each]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two variants are one; values that cannot be compared are told apart by what they are."""
    return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except (ValueError, TypeError):  # arrays: no one truth
        return False


def attempt(choice: Mapping[str, Any], plan: ShardingPlan | None) -> Attempt:
    """What became of a variant: its plan, or None."""
    choice = dict(choice)  # the function's own, to do with as it likes
    if plan is None:
        return Attempt(choice, False, math.inf, math.inf, math.inf)
    found = plan.estimate
    return Attempt(choice, plan.fits, found.step_time_us, found.peak_memory_bytes, plan.limit_bytes or math.inf)


def fastest(made: Sequence[Made]) -> BoundPlan:
    """The variant of the fastest plan that fits (of the leanest if none does), with a table; the first that ties."""
    fitting = [one for one in made if one[1].plan.fits]
    if fitting:
        choice, bound = min(fitting, key=lambda one: one[1].plan.estimate.step_time_us)
    else:
        choice, bound = min(made, key=lambda one: one[1].plan.estimate.peak_memory_bytes)
    return variant_table(bound, choice, made)


def variant_name(plan: ShardingPlan) -> str:
    """The plan's strategy, and its variant where it has one."""
    return f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen


def variant_table(bound: BoundPlan, choice: Mapping[str, Any], made: Sequence[Made]) -> BoundPlan:
    """The plan with the table of all variants that were planned beside it."""
    if len(made) == 1 and not choice:  # no variants: one that was made elsewhere may have a table of its own
        return bound
    plans = [(each, one.plan) for each, one in made]
    rows = [(dict(each), p.chosen, p.estimate.step_time_us, p.estimate.peak_memory_bytes) for each, p in plans if each]
    return bound.where(variant=dict(choice), variants=tuple(rows), history=of_variants(plans))
