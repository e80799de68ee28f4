"""The fastest of several sets of compiler options for one plan, as compiled for the target."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard._units import bytes_text, ratio_text, time_text
from autoshard.sharding.audit import Audit, verify_under
from autoshard.sharding.audit.constants import TIMEOUT_S
from autoshard.sharding.autotune.constants import COMPILER_MESSAGE_CHARS, LEAST_OPTION_GAIN, MOST_OPTION_SETS
from autoshard.sharding.machines.options import (
    Options,
    OptionSet,
    ProgramFacts,
    applicable_sets,
    with_needed,
    with_set,
)
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.sharding.planner.bound_plan import BoundPlan


@shown
@dataclass(frozen=True)
class _Trial:
    """A plan compiled under its options and one more set.

    Attributes:
        name: the set.
        options: all options.
        audit: the compiled program.
    """

    name: str
    options: Options
    audit: Audit


def fastest_options(
    bound: BoundPlan,
    own: Audit,
    limit: float,
    until: float = math.inf,
    included: Callable[[OptionSet], bool] = lambda _: True,
) -> tuple[BoundPlan, Audit]:
    """Compile a plan under each option set that may pay for it, and keep the fastest program that fits.

    Programs are compiled as far as `own`: up to the schedule, or to machine code. The plan's notes name the chosen set
    and the step time under each set. They also name the sets that the compiler does not know, and those that leave the
    compiled program unchanged.

    Args:
        bound: a plan with its function.
        own: its audit under its own options; it compiles and fits.
        limit: bytes of one device.
        until: the value of `time.monotonic()` after which no program is compiled.
        included: whether a set is tried.

    Returns:
        The plan with the chosen options, and its audit under them.
    """
    facts = program_facts(bound.plan)
    if facts is None or not own.step_time_us:
        return bound, own
    sets = [each for each in applicable_sets(facts, own.options) if included(each)]
    sets, refused = _compatible_sets(bound.plan.requested_options, sets, own, facts)
    trials: list[_Trial] = []
    for each in sets[: MOST_OPTION_SETS if own.until == "code" else None]:
        left = until - time.monotonic()
        if left <= 0:
            break
        options, _ = with_needed(with_set(own.options, each, facts))
        audit = verify_under(bound.executable, options, min(left, TIMEOUT_S), own.until)
        trials.append(_Trial(each.name, options, audit))
    if not trials:
        return bound.where(notes=(*bound.plan.notes, *refused)), own
    best = min((t for t in trials if _is_faster(t.audit, own, limit)), key=_step_us, default=None)
    results = [f"plan's own {time_text(own.step_time_us)}", *(_result(t, own, limit, t is best) for t in trials)]
    notes = [*refused, f"compiler options, {compared_by(own.until)} for {bound.plan.target}: {'; '.join(results)}"]
    if rest := [each.name for each in sets[len(trials) :]]:
        notes.append(f"option sets that were not tried: {', '.join(rest)}; Plan.verify(options=NAME) tries one")
    if best is None:
        return bound.where(notes=(*bound.plan.notes, *notes)), own
    platform = find_target(bound.plan.target).platform
    kept = {name: value for name, value in best.options.items() if name not in best.audit.dropped}
    chosen = {**bound.plan.compiler_options, platform: kept}
    return bound.where(compiler_options=chosen, notes=(*bound.plan.notes, *notes)), best.audit


def compared_by(until: str) -> str:
    """How programs were compared that were compiled `until` the schedule or the machine code, in words."""
    return "by schedules" if until == "schedule" else "compiled"


def failure_text(kind: str, message: str, peak_bytes: float | None, limit: float) -> str:
    """Why a compiled program cannot be used, in words.

    Args:
        kind: the result of the compiler. A program that is `ok` needs more memory than the limit.
        message: the message of the compiler; empty if there is none.
        peak_bytes: the memory that the program needs.
        limit: bytes of one device.
    """
    if kind == "ok":
        return f"needs {bytes_text(peak_bytes or 0.0)} of {bytes_text(limit)}"
    return f"{kind}: {message[:COMPILER_MESSAGE_CHARS]}" if message else kind


def _compatible_sets(
    requested: Options, sets: Sequence[OptionSet], own: Audit, facts: ProgramFacts
) -> tuple[list[OptionSet], list[str]]:
    """The sets that keep every requested option, and a note that names the others."""

    def keeps(each: OptionSet) -> bool:
        options = with_set(own.options, each, facts)
        return all(str(options.get(name)) == str(value) for name, value in requested.items())

    kept = [each for each in sets if keeps(each)]
    others = [each.name for each in sets if each not in kept]
    note = f"option sets that were not tried, because they change requested options: {', '.join(others)}"
    return kept, [note] if others else []


def _step_us(trial: _Trial) -> float:
    return trial.audit.step_time_us or 0.0


def fits(audit: Audit, limit: float) -> bool:
    """Whether a program compiles, has a step time, and needs at most `limit` bytes of a device."""
    return audit.ok and bool(audit.step_time_us) and (audit.peak_bytes or 0.0) <= limit


def _is_faster(audit: Audit, own: Audit, limit: float) -> bool:
    least = (1 - LEAST_OPTION_GAIN) * (own.step_time_us or 0.0)
    return fits(audit, limit) and (audit.step_time_us or 0.0) < least


def _result(trial: _Trial, own: Audit, limit: float, chosen: bool) -> str:
    """What became of one set, in words."""
    audit, text = trial.audit, trial.name
    if not audit.ok or not audit.step_time_us or not own.step_time_us:
        return f"{text} does not compile ({failure_text(audit.kind, audit.message, audit.peak_bytes, limit)})"
    unknown = f" (without {', '.join(audit.dropped)}, unknown to this compiler)" if audit.dropped else ""
    if audit.program and audit.program == own.program:
        return f"{text} changes nothing in the {'schedule' if own.until == 'schedule' else 'compiled program'}{unknown}"
    text += f" {time_text(audit.step_time_us)} ({ratio_text(audit.step_time_us, own.step_time_us)})"
    if not fits(audit, limit):
        text += ", does not fit"
    return f"{text}{unknown}{', chosen' if chosen else ''}"
