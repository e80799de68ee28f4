"""Finds compiler options that change nothing in a compiled program.

If the program without any of the options is the same, all of them change nothing. Otherwise each option is left out
alone, and it changes nothing if the program stays the same. For TPUs, schedules are compared first, because they
take less time: if they differ, so do the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.audit.audit import Audit
from autoshard.sharding.audit.constants import MOST_SINGLE_OPTIONS
from autoshard.sharding.audit.requested_options import RequestedOptions
from autoshard.sharding.machines.options import Options


def idle_options(
    found: Audit, request: RequestedOptions, tried: Sequence[str], compiled: Callable[[Options, Until], Audit]
) -> list[str]:
    """Return the options that change nothing.

    Args:
        found: the program under all options.
        request: the options, and those to compare with.
        tried: the options in question, which the compiler knows.
        compiled: compiles the program under other options, up to its schedule or to machine code.
    """
    if not found.ok or not tried:
        return []
    schedule = compiled(request.options, "schedule") if found.until == "code" else found
    stops = found.until == "code" and schedule.until == "schedule"

    def is_same(options: Options) -> bool:
        if stops and _differ(schedule, compiled(options, "schedule")):
            return False
        audit = compiled(options, found.until)
        return audit.ok and audit.program == found.program

    if is_same(request.own):
        return list(tried)
    if not 2 <= len(tried) <= MOST_SINGLE_OPTIONS:
        return []
    idle = []
    for name in tried:
        without = {n: v for n, v in request.options.items() if n != name}
        if name in request.own:
            without[name] = request.own[name]
        if is_same(without):
            idle.append(name)
    return idle


def _differ(one: Audit, other: Audit) -> bool:
    """Whether the schedules of two programs differ."""
    return one.ok != other.ok or one.program != other.program
