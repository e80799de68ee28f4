"""Schedules to compare plans by, and the machine code of the plan that is chosen.

The compiler of TPUs schedules a program in seconds and then makes machine code for minutes. The roofline of a schedule
ranks plans as their machine code does (`benchmarks/schedule_ranks.py`). So candidates are compared by their schedules,
and machine code is made for the fastest alone. Compilers that do not stop at the schedule make machine code at once.
"""

from __future__ import annotations

import math
import time

from autoshard._units import time_text
from autoshard.sharding.audit import Audit, verify, verify_under
from autoshard.sharding.audit.constants import TIMEOUT_S
from autoshard.sharding.audit.requested_options import requested_options
from autoshard.sharding.autotune.compiled_options import fastest_options
from autoshard.sharding.autotune.constants import COMPILER_MESSAGE_CHARS
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.planner.bound_plan import BoundPlan

NO_CODE = "the program is scheduled, without machine code; plan.verify() or verify=1 makes it, which takes minutes"


def scheduled(executable: Executable, timeout_s: float = TIMEOUT_S) -> Audit:
    """Compile a plan up to its schedule, under its own options.

    Args:
        executable: a plan with its function.
        timeout_s: seconds after which the compiler is stopped.
    """
    return verify_under(executable, requested_options(executable.plan, None).options, timeout_s, "schedule")


def with_code(
    bound: BoundPlan, own: Audit, limit: float, until: float = math.inf, code: bool = True
) -> tuple[BoundPlan, Audit]:
    """Choose compiler options for a plan, and compile it to machine code under them.

    Option sets are compared by their schedules, and those that change only machine code by that.

    Args:
        bound: a plan with its function.
        own: its audit by `scheduled`; it compiles and fits.
        limit: bytes of one device.
        until: the value of `time.monotonic()` after which nothing is compiled.
        code: whether to make machine code, and not to stop at the schedule.

    Returns:
        The plan with the chosen options, and its audit. If the time ends before there is machine code, the audit is
        that of the schedule. If the compiler fails, the audit says so.
    """
    if own.until == "code":
        return fastest_options(bound, own, limit, until)
    chosen, audit = fastest_options(bound, own, limit, until, lambda each: not each.changes_code)
    if not code:
        return _with_note(chosen, NO_CODE), audit
    left = until - time.monotonic()
    made = verify(chosen.executable, timeout_s=min(left, TIMEOUT_S)) if left > 0 else None
    if made is None or made.kind == "timeout":
        note = f"there is no machine code: the {time_text(max(left, 0.0) * 1e6)} that were left did not suffice"
        return _with_note(chosen, note), audit
    if made.ok:
        return fastest_options(chosen, made, limit, until, lambda each: each.changes_code)
    if chosen.plan.compiler_options == bound.plan.compiler_options:
        return chosen, made
    reason = f"{made.kind}{made.message and ': ' + made.message[:COMPILER_MESSAGE_CHARS]}"
    note = f"the option set was dropped, because there is no machine code under it ({reason})"
    own_code = verify(bound.executable, timeout_s=max(until - time.monotonic(), 1.0))
    return _with_note(bound.where(notes=chosen.plan.notes), note), own_code


def _with_note(bound: BoundPlan, note: str) -> BoundPlan:
    return bound.where(notes=(*bound.plan.notes, note))
