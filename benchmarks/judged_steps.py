"""Compiles planned steps for their targets and judges the programs. Nothing runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from estimate import estimate
from estimate_result import Estimate

from autoshard.sharding.audit import Compiled, CompileJob, compile_job, export_plan
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error

TIMEOUT_S = 1800.0  # chosen: seconds after which the compiler is stopped


@dataclass(frozen=True, kw_only=True)
class JudgedStep:
    """A compiled step. Bytes and seconds are of one device.

    Attributes:
        kind: the compiler's result.
        temp_bytes: temporaries of the compiled program.
        predicted_bytes: the predicted peak.
        cycles, roofline: seconds of a step by the two measures of `estimate.py`; None where it has none.
        predicted: predicted seconds of a step.
    """

    kind: str
    temp_bytes: float | None
    predicted_bytes: float
    cycles: float | None
    roofline: float | None
    predicted: float


def exported(made: Any, target: str) -> CompileJob:
    """Export a plan for its target's compiler, under the plan's options."""
    options = made.compiler_options.get(find_target(target).platform, {})
    return export_plan(bound_or_error(made.bound).executable, options)


def compiled(made: Any, target: str) -> Compiled:
    """Compile a plan for its target, under the plan's options."""
    return compile_job(exported(made, target), TIMEOUT_S)


def estimated(result: Compiled, target: str) -> Estimate:
    """Return the referee's estimate of a compiled or scheduled program."""
    places, has_code = result.coordinates or None, result.until == "code"
    return estimate(result.text, target, places, result.memory, has_code=has_code)


def judged(made: Any, target: str, result: Compiled | None = None) -> dict[str, Any]:
    """Compile a plan for its target, unless `result` is given; return the fields of a `JudgedStep`."""
    result = compiled(made, target) if result is None else result
    found: Any = {}
    if result.kind == "ok":
        found = estimated(result, target).step
    of_program = {"kind": result.kind, "temp_bytes": result.memory.get("temp")}
    return of_program | {name: found.get(name) for name in ("cycles", "roofline")} | predicted(made)


def predicted(made: Any) -> dict[str, Any]:
    """Return the fields of a `JudgedStep` that come from the plan alone."""
    return {"predicted_bytes": made.estimate.peak_memory_bytes, "predicted": made.estimate.step_time_us / 1e6}


def scaled_text(value: float | None, factor: float, digits: int = 1) -> str:
    """Return a figure times a factor as text; `-` if there is none."""
    return "-" if value is None else f"{value * factor:.{digits}f}"
