"""Of several plans the best: by what the target's compiler makes of them, or over variants of one program.

A variant is a choice of static keywords: what layers keep for their backward pass, how many microbatches a batch is
processed in. Each is traced and planned; they are compared as candidates of one plan are, by time among what fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.sharding.history import of_variants
from autoshard.sharding.plan import Plan
from autoshard.sharding.report.units import time_text, variant_text
from autoshard.sharding.request import is_request

Made = tuple[dict[str, Any], Plan]


def choices(variants: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Every combination of the keywords' values, in the order in which they were given."""
    if not variants:
        return [{}]
    return [dict(zip(variants, values, strict=True)) for values in itertools.product(*variants.values())]


def fastest(made: Sequence[Made]) -> Plan:
    """The variant of the fastest plan that fits (of the leanest if none does), with a table; the first that ties."""
    fitting = [one for one in made if one[1].fits]
    if fitting:
        choice, plan = min(fitting, key=lambda one: one[1].estimate.step_time_us)
    else:
        choice, plan = min(made, key=lambda one: one[1].estimate.peak_memory_bytes)
    return _tabled(plan, choice, made)


def fastest_of_compiled(made: Sequence[Made], count: int, replan: Callable[[Plan, str], Plan]) -> Plan:
    """Of the `count` best candidates of all variants that one of which the compiler makes the fastest program.

    Args:
        made: the variants, each with its plan.
        count: how many to compile.
        replan: plans the program of a plan by a candidate's words.
    """
    pool: list[tuple[float, int, str | None]] = []
    for n, (_, plan) in enumerate(made):
        found = [c for c in plan.candidates if c[2] <= (plan.limit_bytes or c[2]) and is_request(c[0])]
        pool += [(time, n, words) for words, time, _ in found if words != plan.chosen]
        pool.append((plan.estimate.step_time_us if plan.fits else math.inf, n, None))
    plans = []
    for _, n, words in sorted(pool, key=lambda each: each[0])[:count]:
        choice, plan = made[n]
        plans.append(_tabled(plan if words is None else replan(plan, words), choice, made))
    return fastest_compiled(plans, plans[0].limit_bytes)


def fastest_compiled(plans: Sequence[Plan], limit: float) -> Plan:
    """The plan of which the target's compiler makes the fastest program that fits; the first if it makes none.

    Args:
        plans: plans with their functions, the best first.
        limit: bytes of one device.
    """
    from autoshard.sharding.aot import verify

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
    note = f"the fastest of {len(able)} compiled for {plans[0].target}: " + ", ".join(
        f"{_name(plans[n])} {time_text(times[n])}" for n in able
    )
    return plans[winner].where(audits=tuple(audits), notes=(*plans[winner].notes, note))


def _name(plan: Plan) -> str:
    return f"{plan.chosen} ({variant_text(plan.variant)})" if plan.variant else plan.chosen


def _tabled(plan: Plan, choice: Mapping[str, Any], made: Sequence[Made]) -> Plan:
    rows = [(dict(each), p.chosen, p.estimate.step_time_us, p.estimate.peak_memory_bytes) for each, p in made if each]
    return plan.where(variant=dict(choice), variants=tuple(rows), history=of_variants(made))
