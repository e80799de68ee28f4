"""Large arrays that a function captures: closed over, or hidden in an object among its arguments.

They are constants of the plan: every device holds them whole, and a call after a change still uses the old values.
"""

from __future__ import annotations

import warnings

from autoshard._tracebacks import users_stacklevel
from autoshard._units import bytes_text
from autoshard.errors import AutoshardWarning
from autoshard.sharding.planner.constants import LARGE_CONSTANTS_BYTES
from autoshard.sharding.planner.problem import PlanningProblem


def captured_note(problem: PlanningProblem) -> str:
    """What a plan reports about captured arrays; empty if they are small."""
    if problem.memory.constant_bytes <= LARGE_CONSTANTS_BYTES:
        return ""
    largest = max(problem.program.constants(), key=lambda x: x.nbytes)
    return (
        f"the function captures {bytes_text(problem.memory.constant_bytes)} of arrays, the largest a "
        f"{largest.dtype}{list(largest.shape)}. Every device holds them whole, and later changes have no effect. "
        "Pass them as arguments"
    )


def warn_of_captured_arrays(problem: PlanningProblem) -> None:
    """Warn if a function captures large arrays."""
    if note := captured_note(problem):
        warnings.warn(f"auto_shard({problem.traced.name}): {note}", AutoshardWarning, stacklevel=users_stacklevel())
