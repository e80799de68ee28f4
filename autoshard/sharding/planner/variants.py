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
from autoshard._units import bytes_text, time_text, variant_text
from autoshard.sharding.layout.plan_request import is_request
from autoshard.sharding.plan.search_record import of_variants
from autoshard.sharding.plan.sharding_plan import Plan

Made = tuple[dict[str, Any], Plan]
Ranked = tuple[Any, ...]  # step time in microseconds, peak bytes, and what they are of

ALIKE = 0.001
"""Difference in time and in memory up to which two plans are taken for one program."""

OVER = (1.25, 1.5)
"""How many times the memory that there is a plan may take by the estimate to be compiled all the same, one up to each
of these, if it is faster than all that take less: XLA computes again what does not fit, by a policy of its own."""

SEEN = 4
"""How many times as many candidates as are compiled or run are looked at for those that are not alike."""


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


def rounds(variants: Variants | None, attempts: Sequence[Attempt]) -> Iterator[list[dict[str, Any]]]:
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


def attempt(choice: Mapping[str, Any], plan: Plan | None) -> Attempt:
    """What became of a variant: its plan, or None."""
    choice = dict(choice)  # the function's own, to do with as it likes
    if plan is None:
        return Attempt(choice, False, math.inf, math.inf, math.inf)
    found = plan.estimate
    return Attempt(choice, plan.fits, found.step_time_us, found.peak_memory_bytes, plan.limit_bytes or math.inf)


def fastest(made: Sequence[Made]) -> Plan:
    """The variant of the fastest plan that fits (of the leanest if none does), with a table; the first that ties."""
    fitting = [one for one in made if one[1].fits]
    if fitting:
        choice, plan = min(fitting, key=lambda one: one[1].estimate.step_time_us)
    else:
        choice, plan = min(made, key=lambda one: one[1].estimate.peak_memory_bytes)
    return _tabled(plan, choice, made)


@dataclass(frozen=True)
class Contest:
    """How the best candidates are told apart.

    Attributes:
        count: how many of them.
        judge: the best of their plans, the best by the estimate first, given what a device's memory holds.
        over: how many times that memory one more may take by the estimate, and one more still; they come last.
    """

    count: int
    judge: Callable[[Sequence[Plan], float], Plan]
    over: tuple[float, ...] = ()

    def beyond(self, ranked: Iterable[Ranked], limit: float, most_us: float) -> list[Ranked]:
        """Of candidates `(time, bytes, ...)` that hardly do not fit those which take less time than what takes less."""
        found: list[Ranked] = []
        every = list(ranked)
        for over in self.over:
            within = [each for each in every if limit < each[1] <= over * limit and each[0] < most_us]
            if within:
                found.append(min(within, key=lambda each: each[0]))
                most_us = found[-1][0]
        return found


def contest(verify: int, measure: int) -> Contest | None:
    """What `verify=` and `measure=` ask for, None for nothing."""
    from autoshard.sharding.autotune.measured_time import fastest_measured

    if measure:
        return Contest(measure, fastest_measured)
    if not verify:
        return None
    return Contest(verify, fastest_compiled, OVER if verify > 1 else ())  # one is looked at, as it is


def fastest_of_all(made: Sequence[Made], asked: Contest, replan: Callable[[Plan, str], Plan | None]) -> Plan:
    """Of the best candidates of all variants the one that wins a contest.

    Args:
        made: the variants, each with its plan.
        asked: the contest.
        replan: plans the program of a plan by a candidate's words; None where words that were asked for are refused.
    """
    limit = made[0][1].limit_bytes or math.inf  # one machine's
    pool: list[Ranked] = []
    every: list[Ranked] = []
    for n, (_, plan) in enumerate(made):
        found = [(time, peak, n, words) for words, time, peak in plan.candidates if is_request(words)]
        every += found
        pool += [each for each in found if each[1] <= limit and each[-1] != plan.chosen]
        pool.append((plan.estimate.step_time_us if plan.fits else math.inf, plan.estimate.peak_memory_bytes, n, None))
    ranked = sorted(pool, key=lambda each: each[0])
    plans: list[Plan] = []

    def add(n: int, words: str | None) -> None:
        choice, plan = made[n]
        found = plan if words is None else replan(plan, words)
        if found is not None:
            plans.append(_tabled(found, choice, made))

    for *_, n, words in unlike(ranked[: SEEN * asked.count]):
        if len(plans) == asked.count:
            break
        add(n, words)
    for *_, n, words in asked.beyond(every, limit, ranked[0][0]):
        add(n, words)
    plans = plans or [fastest(made)]
    return asked.judge(plans, limit)


def unlike(ranked: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Candidates `(time, bytes, ...)` with those last that differ from an earlier one in next to nothing.

    What is told apart by less than `ALIKE` in time and memory both is one program in other words: to compile both
    says little.
    """
    first: list[tuple[Any, ...]] = []
    again: list[tuple[Any, ...]] = []
    for each in ranked:
        near = any(all(abs(a - b) <= ALIKE * b for a, b in zip(each[:2], other[:2], strict=True)) for other in first)
        (again if near else first).append(each)
    return [*first, *again]


def fastest_compiled(plans: Sequence[Plan], limit: float) -> Plan:
    """The plan of which the target's compiler makes the fastest program that fits; the first if it makes none.

    Args:
        plans: plans with their functions, the best first.
        limit: bytes of one device.
    """
    from autoshard.sharding.audit import verify

    audits = [verify(plan) for plan in plans]
    able = [n for n, a in enumerate(audits) if a.ok and (a.peak_bytes or 0) <= limit]
    if not able:
        said = "; ".join(
            f"{_name(plan)}: {audit.kind}{': ' + audit.message[:120] if audit.message else ''}"
            for plan, audit in zip(plans, audits, strict=True)
        )
        note = f"none of {len(plans)} compiled for {plans[0].target} as it should ({said})"
        return plans[0].where(audits=tuple(audits), notes=(*plans[0].notes, note))
    times = {n: audits[n].step_time_us or 0.0 for n in able}
    winner = min(able, key=lambda n: times[n])
    best, told = plans[winner], []
    if not best.fits:
        told.append(
            f"by the estimate {_name(best)} takes {bytes_text(best.estimate.peak_memory_bytes)} of a device, compiled "
            f"{bytes_text(audits[winner].peak_bytes or 0)}: XLA computes again what does not fit"
        )
    told.append(
        f"the fastest of {len(able)} compiled for {best.target}: "
        + ", ".join(f"{_name(plans[n])} {time_text(times[n])}" for n in able)
    )
    # That one does not compile of which the estimate says so is nothing to complain of.
    kept = tuple(audit for n, audit in enumerate(audits) if n in able or plans[n].fits)
    return best.where(audits=kept, notes=(*best.notes, *told))


def _name(plan: Plan) -> str:
    return f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen


def _tabled(plan: Plan, choice: Mapping[str, Any], made: Sequence[Made]) -> Plan:
    if len(made) == 1 and not choice:  # no variants: one that was made elsewhere may have a table of its own
        return plan
    rows = [(dict(each), p.chosen, p.estimate.step_time_us, p.estimate.peak_memory_bytes) for each, p in made if each]
    return plan.where(variant=dict(choice), variants=tuple(rows), history=of_variants(made))
