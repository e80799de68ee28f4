"""Whether all processes of a run made the same plan.

Every process plans for itself. Programs that differ would wait for each other's collectives for ever, so before a
plan's first step each tells its digest; process 0 compares, and all go on or all raise.
"""

from __future__ import annotations

import hashlib
import itertools
import json

import jax

from autoshard import _compat
from autoshard._processes import named
from autoshard.errors import PlanError
from autoshard.sharding.plan.serialization import plan_data
from autoshard.sharding.plan.sharding_plan import ShardingPlan

TIMEOUT_S = 600.0
_SAME = "same"
_numbers = itertools.count()


def digest(plan: ShardingPlan) -> str:
    """What of a plan decides the program: the function, the mesh, where everything lies, the compiler's options."""
    data = plan_data(plan)
    kept = ("mesh", "axis_rules", "storage", "inputs", "outputs", "placing", "compiler_options", "fingerprint")
    return hashlib.sha256(json.dumps([data[k] for k in kept]).encode()).hexdigest()[:16]


def check_same_plan(plan: ShardingPlan, timeout_s: float = TIMEOUT_S) -> None:
    """Returns where all processes are about to run the same plan.

    Args:
        plan: this process's.
        timeout_s: how long the others may take to come here.

    Raises:
        PlanError: they are not, or one has not come; in every process.
    """
    if jax.process_count() == 1:
        return
    key = f"autoshard/plan/{next(_numbers)}"
    _compat.tell_processes(f"{key}/{jax.process_index()}", f"{digest(plan)} {plan.function} '{plan.chosen}'")
    if jax.process_index() == 0:
        _compat.tell_processes(f"{key}/verdict", _verdict(key, timeout_s))
    said = _compat.hear_process(f"{key}/verdict", 2 * timeout_s)
    if said != _SAME:
        raise PlanError(said or f"auto_shard({plan.function}): process 0 has not compared the plans: it failed before")


def _verdict(key: str, timeout_s: float) -> str:
    found = [_compat.hear_process(f"{key}/{p}", timeout_s) for p in range(jax.process_count())]
    if None in found:
        return (
            f"process {found.index(None)} has not planned after {timeout_s:.0f} s: it failed before or does other work"
        )
    plans: dict[str, list[int]] = {}
    for process, text in enumerate(found):
        plans.setdefault(str(text), []).append(process)
    if len(plans) == 1:
        return _SAME
    listed = "; ".join(f"{text} in {named(processes)}" for text, processes in plans.items())
    return (
        f"the processes made different plans: {listed}. Each must run the same code on the same versions, with the "
        "same shapes and options; Plan.to_json() of each says what differs"
    )
