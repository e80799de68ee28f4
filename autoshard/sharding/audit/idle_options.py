"""Finds compiler options that change nothing in a compiled program.

If the program without any of the options is the same, all of them change nothing. Otherwise each option is left out
alone, and it changes nothing if the program stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoshard.sharding.audit.audit import Audit
from autoshard.sharding.audit.constants import MOST_SINGLE_OPTIONS
from autoshard.sharding.audit.requested_options import RequestedOptions
from autoshard.sharding.machines.options import Options


def idle_options(
    found: Audit, request: RequestedOptions, tried: Sequence[str], compiled: Callable[[Options], Audit]
) -> list[str]:
    """Return the options that change nothing.

    Args:
        found: the program under all options.
        request: the options, and those to compare with.
        tried: the options in question, which the compiler knows.
        compiled: compiles the program under other options.
    """
    if not found.ok or not tried:
        return []
    own = compiled(request.own)
    if own.ok and own.program == found.program:
        return list(tried)
    if not 2 <= len(tried) <= MOST_SINGLE_OPTIONS:
        return []
    idle = []
    for name in tried:
        without = {n: v for n, v in request.options.items() if n != name}
        if name in request.own:
            without[name] = request.own[name]
        audit = compiled(without)
        if audit.ok and audit.program == found.program:
            idle.append(name)
    return idle
