"""The options of a plan, checked before anything is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard._typed import shortly
from autoshard.errors import PlanError
from autoshard.sharding.layout.plan_request import Table
from autoshard.sharding.machines.targets import check_name
from autoshard.sharding.plan.sharding_plan import ShardingPlan


def checked_options(verify: int, measure: int, **options: Any) -> dict[str, Any]:
    """The options of a plan, after a look at their types.

    Raises:
        PlanError: naming the one that cannot be used.
    """
    for name, count, what in (("verify", verify, "compile for the target"), ("measure", measure, "run")):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise PlanError(f"{name} is {shortly(count)}; give the number of plans to {what}, 0 for none")
    if verify and measure:
        raise PlanError("verify and measure both choose among the best plans: give one of them")
    made, limit, target = options["plan"], options["memory_limit_bytes"], options["target"]
    if target is not None:
        check_name(target)
    if not isinstance(options["strict"], bool):
        raise PlanError(f"strict is {shortly(options['strict'])}; give True or False")
    if isinstance(made, Mapping):
        Table.read(made)
    elif made is not None and not isinstance(made, (str, ShardingPlan)):
        raise PlanError(
            f"plan is {shortly(made)}; give words such as 'fsdp:8', a table such as {{'fsdp': ['batch']}}, or a Plan"
        )
    if isinstance(made, ShardingPlan) and options["fixed"]:
        raise PlanError(
            "plan is a Plan, which says where every input lies, and fixed says it too. Drop one, or give the plan's "
            f"words with fixed: plan={made.chosen!r}"
        )
    if limit is not None and not _is_positive(limit):
        raise PlanError(
            f"memory_limit_bytes is {shortly(limit)}; give a positive number of bytes on each device, such as 4 * 2**30"
        )
    options["memory_limit_bytes"] = limit if limit is None else float(limit)
    return options | {name: n for name, n in (("verify", verify), ("measure", measure)) if n}


def _is_positive(n: Any) -> bool:
    """Whether this is a number above 0 of whatever type."""
    try:
        return not isinstance(n, str | bytes | bool) and float(n) > 0
    except (TypeError, ValueError, OverflowError):
        return False
