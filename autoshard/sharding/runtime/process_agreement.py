"""Checks that all processes of a run made the same plan.

Every process makes its own plan. Processes with different programs would wait for each other's collectives forever.
Therefore each process publishes a digest of a plan before its first step. Process 0 compares the digests, and all
processes continue or all raise.
"""

from __future__ import annotations

import hashlib
import itertools
import json

import jax

from autoshard import _compat
from autoshard._processes import processes_text
from autoshard.errors import PlanError
from autoshard.sharding.plan.serialization import plan_data
from autoshard.sharding.plan.sharding_plan import ShardingPlan

TIMEOUT_S = 600.0  # to wait for a process's plan; chosen, not measured
_SAME = "same"
_check_numbers = itertools.count()  # gives each check its own key


def digest(plan: ShardingPlan) -> str:
    """Hash the parts of a plan that determine its program."""
    data = plan_data(plan)
    keys = ("mesh", "axis_rules", "storage", "inputs", "outputs", "placing", "compiler_options", "fingerprint")
    return hashlib.sha256(json.dumps([data[k] for k in keys]).encode()).hexdigest()[:16]


def check_same_plan(plan: ShardingPlan, timeout_s: float = TIMEOUT_S) -> None:
    """Check that all processes are about to run the same plan.

    Args:
        plan: this process's plan.
        timeout_s: how long to wait for the other processes, in seconds.

    Raises:
        PlanError: the plans differ, or a process did not make this call in time. Raised in every process.
    """
    if jax.process_count() == 1:
        return
    key = f"autoshard/plan/{next(_check_numbers)}"
    _compat.publish_text(f"{key}/{jax.process_index()}", f"{digest(plan)} {plan.function} '{plan.chosen}'")
    if jax.process_index() == 0:
        _compat.publish_text(f"{key}/verdict", _verdict(key, timeout_s))
    verdict = _compat.wait_for_text(f"{key}/verdict", 2 * timeout_s)
    if verdict != _SAME:
        raise PlanError(
            verdict
            or f"auto_shard({plan.function}): process 0 has not compared the plans of all processes: it failed "
            "earlier. See its log"
        )


def _verdict(key: str, timeout_s: float) -> str:
    texts = [_compat.wait_for_text(f"{key}/{p}", timeout_s) for p in range(jax.process_count())]
    if None in texts:
        return (
            f"process {texts.index(None)} has not planned after {timeout_s:.0f} s: it failed earlier, or runs other "
            "code. See its log"
        )
    plans: dict[str, list[int]] = {}
    for process, text in enumerate(texts):
        plans.setdefault(str(text), []).append(process)
    if len(plans) == 1:
        return _SAME
    listed = "; ".join(f"{text} in {processes_text(processes)}" for text, processes in plans.items())
    return (
        f"the processes made different plans: {listed}. Each must run the same code and library versions with the "
        "same shapes and options; compare Plan.to_json() of each"
    )
