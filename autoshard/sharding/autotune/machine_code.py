"""Schedules to compare plans by, and the machine code of the plan that is chosen.

The compiler of TPUs schedules a program in seconds and then generates machine code for minutes. The roofline of a
schedule ranks plans as their machine code does (`benchmarks/schedule_ranks.py`). So candidates are compared by their
schedules, and machine code is generated for the fastest alone. Compilers that do not stop at the schedule generate
machine code at once.
"""

from __future__ import annotations

import math
import time

from autoshard._units import time_text
from autoshard.sharding.audit import Audit, verify, verify_under
from autoshard.sharding.audit.constants import TIMEOUT_S
from autoshard.sharding.audit.requested_options import requested_options
from autoshard.sharding.autotune.compiled_options import failure_text, fastest_options, fits
from autoshard.sharding.lower.executable import Executable
from autoshard.sharding.planner.bound_plan import BoundPlan

NO_CODE = "the program is scheduled and has no machine code; Plan.verify() makes it, which takes minutes"


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

    Option sets are compared by their schedules, and those that change only machine code by that. If there is no machine
    code under the chosen set, or it does not fit, the plan's own options are kept.

    Args:
        bound: a plan with its function.
        own: its audit by `scheduled`; it compiles and fits.
        limit: bytes of one device.
        until: the value of `time.monotonic()` after which nothing is compiled.
        code: whether to generate machine code, and not to stop at the schedule.

    Returns:
        The plan with the chosen options, and its audit. If the time ends before there is machine code, the audit is
        that of the schedule. If the compiler fails, or the program does not fit, the audit is that of the failure.
    """
    if own.until == "code":
        return _with_option_notes(*fastest_options(bound, own, limit, until), until)
    chosen, schedule = fastest_options(bound, own, limit, until, lambda each: not each.changes_code)
    if not code:
        return _with_option_notes(_with_note(chosen, NO_CODE), schedule, until)
    made = _code_of(chosen, until)
    if chosen.plan.compiler_options != bound.plan.compiler_options and not _is_final(made, limit):
        reason = failure_text(made.kind, made.message, made.peak_bytes, limit)
        note = f"the option set was dropped, because its machine code fails: {reason}"
        chosen, schedule = _with_note(bound.where(notes=chosen.plan.notes), note), own
        made = _code_of(chosen, until)
    if made.kind == "timeout":
        return _with_option_notes(_with_note(chosen, f"there is no machine code: {made.message}"), schedule, until)
    if not fits(made, limit):
        return chosen, made
    return fastest_options(chosen, made, limit, until, lambda each: each.changes_code)


def _is_final(made: Audit, limit: float) -> bool:
    """Whether no other options are tried."""
    return made.kind == "timeout" or fits(made, limit)


def _code_of(bound: BoundPlan, until: float) -> Audit:
    """Compile a plan to machine code under its own options."""
    left = min(until - time.monotonic(), TIMEOUT_S)
    if left <= 0:
        return Audit("timeout", "the time for compilations is over")
    made = verify(bound.executable, timeout_s=left)
    stopped = f"the compiler was stopped after {time_text(left * 1e6)}"
    return Audit("timeout", stopped) if made.kind == "timeout" else made


def _with_option_notes(bound: BoundPlan, audit: Audit, until: float) -> tuple[BoundPlan, Audit]:
    """Return a plan with its audit, which gets the notes on requested options that `verify` writes."""
    left = min(until - time.monotonic(), TIMEOUT_S)
    if not bound.plan.requested_options or not audit.ok or left <= 0:
        return bound, audit
    found = verify(bound.executable, timeout_s=left, until=audit.until)  # the program is in the compiler's cache
    return bound, found if found.ok else audit


def _with_note(bound: BoundPlan, note: str) -> BoundPlan:
    return bound.where(notes=(*bound.plan.notes, note))
