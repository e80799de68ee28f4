"""How `autoshard plan` compiles plans: `--verify`, or its default."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from autoshard.commands.arguments import AUTO, SCHEDULE


def verification(
    verify: int | Literal["auto", "schedule"] | None,
    timeout_s: float | None,
    options: Mapping[str, Any],
    measure: int = 0,
) -> dict[str, Any]:
    """Return the options `verify` and `verify_timeout_s` of a plan.

    The default is `schedule` for TPUs. It is `auto` for GPUs, because their compilers do not stop at the schedule. A
    line on standard error says how long that may take. If the compiler is missing, nothing is compiled, and the line
    says what to install. By default, plans for CPUs and plans that are measured are not compiled.

    Args:
        verify: the number of plans to compile, `auto`, `schedule`, or None for the default.
        timeout_s: seconds for all compilations of `auto` or `schedule`.
        options: the other options of the plan.
        measure: the number of plans to run.
    """
    found: dict[str, Any] = {} if timeout_s is None else {"verify_timeout_s": timeout_s}
    if verify is not None or measure:
        return found | ({} if verify is None else {"verify": verify})
    from autoshard.sharding.audit.aot_compile import missing_compiler
    from autoshard.sharding.autotune.constants import SETTLING_S

    platform = _platform(options.get("target"))
    if platform not in ("tpu", "cuda"):
        return found | ({} if timeout_s is None else {"verify": AUTO})
    if missing := missing_compiler(platform):
        print(f"autoshard plan: plans are not compiled: {missing}", file=sys.stderr)
        return {}
    seconds = SETTLING_S if timeout_s is None else timeout_s
    word, what = (SCHEDULE, "schedules") if platform == "tpu" else (AUTO, "compiles")
    print(
        f"autoshard plan: {what} the fastest plans to compare them, for up to {seconds:g} s; --verify 0 skips this",
        file=sys.stderr,
    )
    return found | {"verify": word}


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
