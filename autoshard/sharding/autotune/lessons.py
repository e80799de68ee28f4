"""Lessons: the step time and memory of the compiled plans of a program, kept in a file for the next plan.

A file contains the lessons of one traced program on one target, under one version of the compilers. It is in the folder
`lessons` of the cache of compiled programs (`$AUTOSHARD_CACHE`). Two programs count as the same if their jaxprs and
their donated arguments are equal. A lesson is used only for a plan with the same options, shardings and estimate. So if
a change of the planner changes the price of a plan, the plan is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from autoshard._shown import shown
from autoshard.sharding.audit import Audit
from autoshard.sharding.audit.aot_compile import cache_folder, environment_key
from autoshard.sharding.autotune.constants import SAME_ESTIMATE
from autoshard.sharding.plan.serialization import plan_data
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.variants import variant_name
from autoshard.sharding.program.tracing import Traced

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function among the parameters of a jaxpr; differs in each process
_MEANING = "times and peaks of schedules"  # changed with the meaning of a figure, so that no earlier lesson is read
_SHARDINGS = ("mesh", "axis_rules", "storage", "inputs", "outputs", "placing", "overlap")  # fields of a plan


@shown
@dataclass(frozen=True)
class Lesson:
    """The result of compiling a plan.

    Attributes:
        kind: the compiler's result: `ok` or `oom`.
        estimated_us: the estimated step time, in microseconds.
        step_us: the compiled step time, in microseconds; infinite if the program does not fit.
        peak_bytes: the compiled peak of a device.
        until: how far it was compiled: `schedule` or `code`.
    """

    kind: str
    estimated_us: float
    step_us: float
    peak_bytes: float
    until: str = "code"

    def fits(self, limit: float) -> bool:
        """Whether the program compiles and needs at most `limit` bytes of a device."""
        return self.kind == "ok" and math.isfinite(self.step_us) and self.peak_bytes <= limit


def lesson_of(plan: ShardingPlan, audit: Audit) -> Lesson:
    """Return the lesson that the audit of a plan gives."""
    step_us = audit.step_time_us if audit.ok and audit.step_time_us else math.inf
    return Lesson(audit.kind, plan.estimate.step_time_us, step_us, audit.peak_bytes or 0.0, audit.until)


class Lessons:
    """The lessons of one program on one target. Without a readable and writable file, plans are compiled again."""

    def __init__(self, bound: BoundPlan):
        parts = (_program(bound.traced), bound.plan.target, sorted(environment_key().items()), _MEANING)
        self.path = cache_folder() / "lessons" / f"{_digest(parts)}.json"
        self.known: dict[str, Lesson] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # there is no file, or it is damaged
            rows: Mapping[str, Any] = json.loads(self.path.read_text())
            self.known = {name: Lesson(**row) for name, row in rows.items()}

    def of(self, plan: ShardingPlan) -> Lesson | None:
        """Return the lesson of a plan; None if it has not been compiled with this estimate."""
        found = self.known.get(_name(plan))
        same = found is not None and math.isclose(found.estimated_us, plan.estimate.step_time_us, rel_tol=SAME_ESTIMATE)
        return found if same else None

    def add(self, plan: ShardingPlan, lesson: Lesson) -> None:
        """Keep a lesson, unless the compiler failed for a reason that may be temporary."""
        if lesson.kind not in ("ok", "oom"):
            return
        self.known[_name(plan)] = lesson
        rows = json.dumps({name: asdict(each) for name, each in self.known.items()}, indent=1)
        with suppress(OSError):  # the folder is read-only, or the disk is full
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(f".{os.getpid()}")
            scratch.write_text(rows + "\n")
            scratch.replace(self.path)


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()[:32]


def _program(traced: Traced) -> tuple[str, ...]:
    """Return texts that differ between programs that compile differently."""
    return traced.fingerprint, _ADDRESS.sub("", str(traced.closed)), repr(sorted(traced.donated))


def _name(plan: ShardingPlan) -> str:
    """Return the key of a plan: the options in which plans with one estimate may differ, and a digest of shardings."""
    data = plan_data(plan)
    words = {
        "plan": variant_name(plan),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "offload": "+".join(plan.offload),
        "gather": plan.gather,
        "kernels": plan.kernels_word,
        "options": ",".join(f"{k}={v}" for k, v in sorted(plan.requested_options.items())),
        "shardings": _digest([data.get(name) for name in _SHARDINGS]),
    }
    return "; ".join(f"{name} {value}" for name, value in words.items() if value)
