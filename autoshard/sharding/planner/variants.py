"""Variants of one program, and the best of their plans.

A variant is a choice of static keywords: the remat policy, the number of microbatches. Each is traced and planned. They
are compared like the candidates of one plan: by time, among those that fit. The user gives the values of each keyword,
or a function that gets the attempts so far and returns the variants to try next.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown
from autoshard._typed import short_repr
from autoshard._units import variant_text
from autoshard.errors import PlanError
from autoshard.sharding.plan.memory_doubt import plan_ranked_us
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.search_summary import variant_records

PlannedVariant = tuple[dict[str, Any], BoundPlan]


@shown
@dataclass(frozen=True)
class Attempt:
    """The outcome of one variant.

    Attributes:
        keywords: the variant.
        fits: whether its plan fits the memory; false if it could not be planned.
        step_time_us: estimated time of a step; infinite if it could not be planned.
        peak_memory_bytes: estimated peak memory of a device; infinite if it could not be planned.
        limit_bytes: memory of a device.
    """

    keywords: Mapping[str, Any]
    fits: bool
    step_time_us: float
    peak_memory_bytes: float
    limit_bytes: float


Next = Callable[[Sequence[Attempt]], Sequence[Mapping[str, Any]]]
Variants = Mapping[str, Sequence[Any]] | Next
"""Keywords with their values, or a function that gets the attempts so far and returns the keywords to try next."""


def checked_variants(variants: Any, fn: Callable[..., Any]) -> Variants | None:
    """Return the variants of a function after a check of their types and keywords.

    What a function returns is checked when it is called.

    Raises:
        PlanError: `variants` has another type, or the function does not take a keyword.
    """
    if variants is None:
        return None
    if isinstance(variants, Mapping):
        for name, values in variants.items():
            if not isinstance(name, str):
                raise PlanError(f"variants: {short_repr(name)} is not a keyword; give {{keyword: values}}")
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise PlanError(
                    f"variants: {name!r} is {short_repr(values)}; give a list of its values, such as "
                    f"{{{name!r}: [{short_repr(values)}]}}"
                )
        _check_keywords(fn, variants)
        return variants
    if not callable(variants):
        raise PlanError(
            f"variants is {short_repr(variants)}; give {{keyword: values}}, such as {{'remat': [True, False]}}, or a "
            "function that takes the attempts so far and returns the keywords to try next"
        )

    def following(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
        choices = _checked_choices(variants(attempts))
        for choice in choices:
            _check_keywords(fn, choice)
        return choices

    return following


def _check_keywords(fn: Callable[..., Any], names: Iterable[Any]) -> None:
    """Raise a `PlanError` if a function does not take these keywords. A function without a signature may take any."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if unknown := [name for name in names if name not in known]:
        raise PlanError(
            f"variants: {getattr(fn, '__name__', type(fn).__name__)} has no parameter {short_repr(unknown[0])}; it has "
            f"{', '.join(known) or 'none'}. Add the parameter to the function, or remove it from variants"
        )


def variant_rounds(variants: Variants | None, attempts: Sequence[Attempt]) -> Iterator[list[dict[str, Any]]]:
    """The variants to plan, round by round.

    Args:
        variants: the values of each keyword, all combinations of which are one round; or a function from the attempts
            so far (none at first) to the variants to try next. The iteration ends when it returns nothing new.
        attempts: the outcomes so far. The caller appends to it during the iteration.
    """
    if not variants:
        yield [{}]
        return
    if isinstance(variants, Mapping):
        yield [dict(zip(variants, values, strict=True)) for values in itertools.product(*variants.values())]
        return
    tried: list[dict[str, Any]] = []
    while True:
        new: list[dict[str, Any]] = []
        for choice in map(dict, variants(tuple(attempts))):
            if not any(_same(choice, other) for other in tried):
                tried.append(choice)
                new.append(choice)
        if not new:
            return
        yield new


def _checked_choices(returned: Any) -> list[dict[str, Any]]:
    """The variants that the user's function of attempts returned, after a check of their types."""
    choices = None if isinstance(returned, Mapping | str) or not isinstance(returned, Iterable) else list(returned)
    if choices is None or not all(isinstance(one, Mapping) for one in choices):
        raise PlanError(
            f"variants returned {short_repr(returned)}: return a list of {{keyword: value}}, empty at the end"
        )
    return [dict(one) for one in choices]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two variants are the same; values that cannot be compared are compared by identity."""
    return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except (ValueError, TypeError):  # arrays have no single truth value
        return False


def attempt(choice: Mapping[str, Any], plan: ShardingPlan | None) -> Attempt:
    """The outcome of a variant.

    Args:
        choice: the variant.
        plan: its plan; None if it could not be planned.
    """
    choice = dict(choice)  # a copy: the user's function may change it
    if plan is None:
        return Attempt(choice, False, math.inf, math.inf, math.inf)
    found = plan.estimate
    return Attempt(choice, plan.fits, found.step_time_us, found.peak_memory_bytes, plan.limit_bytes or math.inf)


def fastest(made: Sequence[PlannedVariant]) -> BoundPlan:
    """The fastest plan that fits, or the one that needs the least memory if none fits; ties go to the first."""
    fitting = [one for one in made if one[1].plan.fits]
    if fitting:
        choice, bound = min(fitting, key=lambda one: plan_ranked_us(one[1].plan))
    else:
        within = [one for one in made if one[1].plan.fits_host] or made
        choice, bound = min(within, key=lambda one: one[1].plan.estimate.peak_memory_bytes)
    return variant_table(bound, choice, made)


def variant_name(plan: ShardingPlan) -> str:
    """The plan's strategy, and its variant if it has one."""
    return f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen


def variant_table(bound: BoundPlan, choice: Mapping[str, Any], made: Sequence[PlannedVariant]) -> BoundPlan:
    """Return a plan with its own variant and the table of all variants that were planned."""
    if len(made) == 1 and not choice:  # no variants; a plan that was read may have a table of its own
        return bound
    plans = [(each, one.plan) for each, one in made]
    rows = [(dict(each), p.chosen, p.estimate.step_time_us, p.estimate.peak_memory_bytes) for each, p in plans if each]
    return bound.where(variant=dict(choice), variants=tuple(rows), history=variant_records(plans))
