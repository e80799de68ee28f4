"""`--verify` of `autoshard plan`: how many plans are compiled, and the default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Literal

Verify = int | Literal["auto"]
AUTO = "auto"


def parse_verify(text: str) -> Verify:
    """Parse a value of `--verify`: a number, or `auto`."""
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number") from None


def verification(
    verify: Verify | None, timeout_s: float | None, options: Mapping[str, Any], measure: int = 0
) -> dict[str, Any]:
    """Return the options `verify` and `verify_timeout_s` of a plan.

    Where nothing is given, TPUs and GPUs have `verify="auto"` if their compiler is installed; else one line on standard
    error says what to install. Plans for CPUs, and plans that are measured, are then not compiled.

    Args:
        verify: the number of plans to compile, `auto`, or None if nothing is given.
        timeout_s: seconds for all compilations of `auto`.
        options: the other options of the plan.
        measure: the number of plans to run.
    """
    found: dict[str, Any] = {} if timeout_s is None else {"verify_timeout_s": timeout_s}
    if verify is not None or measure:
        return found | ({} if verify is None else {"verify": verify})
    from autoshard.sharding.audit.aot_compile import missing_compiler

    platform = _platform(options.get("target"))
    if platform not in ("tpu", "cuda"):
        return found | ({} if timeout_s is None else {"verify": AUTO})
    if missing := missing_compiler(platform):
        print(f"autoshard plan: plans are not compiled: {missing}", file=sys.stderr)
        return {}
    return found | {"verify": AUTO}


def _platform(target: str | None) -> str:
    """Return the platform of a target, or of the attached devices; empty if the target has no compiler."""
    import jax

    from autoshard.sharding.audit.audit import AuditError
    from autoshard.sharding.audit.verification import compile_target

    if target is None:
        found = jax.devices()[0].platform
        return "cuda" if found == "gpu" else found
    try:
        return compile_target(target).platform
    except AuditError:
        return ""  # an unknown target is an error of the planner
