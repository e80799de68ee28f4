"""The price of other shardings of a tensor: alternatives in `plan.explain(path)`, wishes in `plan.explain(path, wish)`.

Each alternative gets a verdict on its step time: faster, slower, a tie, or infeasible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard._columns import INDENT, columns
from autoshard._units import bytes_text, change_text, spec_text, time_text
from autoshard.errors import PlanError
from autoshard.sharding.layout.fixed_shardings import is_sharding_wish, same_spec
from autoshard.sharding.layout.plan_request import is_request
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.planner.bound_plan import BoundPlan, bound_or_error
from autoshard.sharding.planner.constants import ALTERNATIVE_TIE
from autoshard.sharding.planner.what_if import (
    Alternative,
    best_without,
    neighbouring_specs,
    price_in_plan,
    price_replanned,
)
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.report.summary import mesh_sizes, path_text

FIXED_SHOWN = 3


def alternative_lines(plan: ShardingPlan, bound: BoundPlan | None, leaves: Sequence[Leaf]) -> list[str]:
    """The next best shardings of a group of inputs, with their cost; empty if nothing can be sharded."""
    if bound is None or plan.mesh.size == 1 or leaves[0] not in plan.inputs or math.prod(leaves[0].shape) < 2:
        return []
    choices = neighbouring_specs(bound, leaves)
    if not choices:
        return []
    now, best = _as_planned(plan), choices[0]
    others = [c for c in choices[1:] if _figures(plan, c, now) != _figures(plan, best, now)]
    shown = [best, *others[:1], *(c for c in others[1:] if not any(_spec(c)))]
    moments = f"; {_moments(best)} sharded the same way" if best.moments else ""
    estimate = plan.estimate
    figures = f"step {time_text(estimate.step_time_us)}, memory {bytes_text(estimate.peak_memory_bytes)}"
    lines = [f"alternatives (all else as planned: {figures}{moments}):"]
    rows = [(spec_text(_spec(c)), _verdict(plan, c, now) + ":", _figures(plan, c, now)) for c in shown]
    return lines + [INDENT + line for line in columns(rows)]


def wish_lines(plan: ShardingPlan, bound: BoundPlan | None, leaves: Sequence[Leaf], wish: Any) -> list[str]:
    """Whether a wish is faster, slower, infeasible or a tie: under the plan, and when replanned with it.

    Raises:
        PlanError: The wish is not of a type that `fixed=` takes, or `leaves` are results.
    """
    bound = bound_or_error(bound)
    if not is_sharding_wish(wish):
        raise PlanError(f"explain: wish is {wish!r:.60}; give a PartitionSpec, or a logical axis or None for each "
                        "dimension, such as ('ffn', None)")  # fmt: skip
    check_fixable(leaves[0].path, leaves[0] in plan.inputs)
    text = spec_text(wish) if isinstance(wish, PartitionSpec) else str(tuple(wish))
    name = path_text(plan, leaves[0]) + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")
    now = "; ".join(dict.fromkeys(spec_text(x.spec) for x in leaves[:3]))
    if isinstance(wish, PartitionSpec) and all(same_spec(wish, x.spec, len(x.shape)) for x in leaves):
        return [f"{name}: {text} is its sharding already; explain without a wish shows alternatives"]
    choices = price_in_plan(bound, leaves, wish)
    in_plan = _best(plan, choices)
    replanned, without = _best(plan, price_replanned(bound, leaves, wish)), best_without(bound)
    verdicts = [_verdict(plan, in_plan, _as_planned(plan)), _verdict(plan, replanned, without)]
    if in_plan.spec_in_plan is not None and not isinstance(wish, PartitionSpec):
        text += f", under this plan {spec_text(in_plan.spec_in_plan)},"
    lines = [f"{name}: {text} instead of {now}: {_headline(*verdicts)}"]
    lines.append(f"{INDENT}under this plan ({plan.chosen or 'as it is'}): {_line(plan, in_plan, _as_planned(plan))}")
    if len(choices) > 1 and not in_plan.refusal:
        lines.append(INDENT * 2 + _with_or_without(plan, in_plan, choices))
    requests = [(in_plan, "to get it")]
    if not in_plan.refusal and (replanned.strategy, replanned.fixed, without.strategy) == (
        plan.chosen,
        in_plan.fixed,
        plan.chosen,
    ):
        lines.append(f"{INDENT}replanned with it: the same plan")
    else:
        lines.append(INDENT + _replanned_line(plan, replanned, without))
        requests.append((replanned, "to replan with it"))
    for choice, what in requests:
        if _feasible(plan, choice):
            lines.append(f"{INDENT}{what}: {_how(plan, choice, choice is in_plan)}")
    return lines


def check_fixable(path: str, is_input: bool) -> None:
    """Check that a path names an input, because a sharding can be fixed only for inputs.

    Raises:
        PlanError: It names a result.
    """
    if not is_input:
        raise PlanError(f"explain: '{path}' is a result, which cannot be fixed: returned state is sharded like its "
                        "input, other results as they are computed. Give the path of an input")  # fmt: skip


def _as_planned(plan: ShardingPlan) -> Alternative:
    return Alternative({}, plan.estimate.step_time_us, plan.estimate.peak_memory_bytes, plan.chosen)


def _replanned_line(plan: ShardingPlan, choice: Alternative, without: Alternative) -> str:
    if choice.refusal:
        return "replanned with it: infeasible in every plan"
    best = "" if without.strategy == plan.chosen else f"; without it {without.strategy}"
    return f"replanned with it ({choice.strategy}{best}): {_line(plan, choice, without)}"


def _spec(choice: Alternative) -> Any:
    return next(iter(choice.fixed.values()))


def _feasible(plan: ShardingPlan, choice: Alternative) -> bool:
    return not choice.refusal and choice.peak_bytes <= (plan.limit_bytes or math.inf)


def _best(plan: ShardingPlan, choices: Sequence[Alternative]) -> Alternative:
    """The fastest choice that fits; if none fits, the one with the least step time, memory and fixed inputs."""

    def rank(c: Alternative) -> tuple[bool, float, float, int]:
        return (not _feasible(plan, c), round(c.step_time_us, 3), c.peak_bytes, len(c.fixed))

    return min(choices, key=rank)


def _verdict(plan: ShardingPlan, choice: Alternative, before: Alternative) -> str:
    if not _feasible(plan, choice):
        return "infeasible"
    if abs(choice.step_time_us - before.step_time_us) <= ALTERNATIVE_TIE * before.step_time_us:
        return "a tie" if _changes(choice, before)[1] == "the same" else "a tie in time"
    return "slower" if choice.step_time_us > before.step_time_us else "faster"


def _headline(in_plan: str, replanned: str) -> str:
    return in_plan if in_plan == replanned else f"{in_plan} under this plan, {replanned} when replanned"


def _line(plan: ShardingPlan, choice: Alternative, before: Alternative) -> str:
    if choice.refusal:
        return f"infeasible: {choice.refusal}"
    step, memory = _changes(choice, before)
    text = f"step {time_text(choice.step_time_us)}, {step}; memory {bytes_text(choice.peak_bytes)}, {memory}"
    return text + _excess(plan, choice)


def _figures(plan: ShardingPlan, choice: Alternative, before: Alternative) -> str:
    """The changes of time and memory: `step +3.10 ms (+0.3 %), memory the same`."""
    step, memory = _changes(choice, before)
    if step == memory == "the same":
        return "the same step time and memory"
    return f"step {step}, memory {memory}{_excess(plan, choice)}"


def _changes(choice: Alternative, before: Alternative) -> tuple[str, str]:
    return (
        change_text(choice.step_time_us, before.step_time_us, time_text, ALTERNATIVE_TIE),
        change_text(choice.peak_bytes, before.peak_bytes, bytes_text, ALTERNATIVE_TIE),
    )


def _excess(plan: ShardingPlan, choice: Alternative) -> str:
    if _feasible(plan, choice):
        return ""
    over = choice.peak_bytes - plan.limit_bytes
    return f", {bytes_text(over)} over the limit of {bytes_text(plan.limit_bytes)}"


def _moments(choice: Alternative) -> str:
    return "its moment" if choice.moments == 1 else f"the {choice.moments} moments"


def _with_or_without(plan: ShardingPlan, best: Alternative, choices: Sequence[Alternative]) -> str:
    other = next(c for c in choices if c is not best)
    if best.moments:
        return f"with {_moments(best)} sharded the same way; alone: {_figures(plan, other, _as_planned(plan))}"
    return f"alone; with {_moments(other)} sharded the same way: {_figures(plan, other, _as_planned(plan))}"


def _how(plan: ShardingPlan, choice: Alternative, as_planned: bool) -> str:
    """The arguments of `plan` that give the choice."""
    shown = {path: spec_text(w) if isinstance(w, PartitionSpec) else str(tuple(w)) for path, w in choice.fixed.items()}
    shown = {named_path(path, plan.arguments): text for path, text in shown.items()}
    fixed = ", ".join(f"'{path}': {text}" for path, text in list(shown.items())[:FIXED_SHOWN])
    rest = f", and {len(shown) - FIXED_SHOWN} more" if len(shown) > FIXED_SHOWN else ""
    plan_argument = ""
    if as_planned:
        plan_argument = f"plan={plan.chosen!r}, " if is_request(plan.chosen) else f"mesh={mesh_sizes(plan)}, "
    return f"{plan_argument}fixed={{{fixed}{rest}}}"
