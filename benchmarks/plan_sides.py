"""A plan of a model's step, predicted and compiled."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from estimate import CHIPS as JUDGED
from judged_steps import estimated
from plan_rows import Planned, Row, Store
from recipe_file import Options

from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.sharding.audit.aot_compile import compile_job, missing_compiler
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.cost import offload_time
from autoshard.sharding.cost.delays import host_fetches
from autoshard.sharding.lower.tpu import host_stacks, stack_layouts
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error


@dataclass(frozen=True)
class Side:
    """A plan of a step, or why there is none. Seconds and bytes are of one device and one step.

    Attributes:
        words: the strategy; empty if there is no plan.
        remat: the policy of the layers.
        microbatches: the number of microbatches.
        predicted: the planner's `seconds`, `compute_seconds`, `exposed_seconds`, `memory_bytes`, `host_bytes`,
            `limit_bytes`; empty if there is no plan.
        compiled: the referee's figures, see `_compiled`; None if it was not compiled.
        problem: why there is no plan, or why it was not compiled.
    """

    words: str = ""
    remat: str = ""
    microbatches: int = 1
    predicted: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, Any] | None = None
    problem: str = ""

    @property
    def seconds(self) -> float | None:
        """The predicted step time; None if there is no plan."""
        return self.predicted.get("seconds")

    @property
    def fits(self) -> bool | None:
        """Whether the planner says that it fits; None if there is no plan."""
        if not self.predicted:
            return None
        return not self.predicted["limit_bytes"] or self.predicted["memory_bytes"] <= self.predicted["limit_bytes"]

    @property
    def name(self) -> str:
        """`fsdp:16, full, 2 microbatches`."""
        if not self.words:
            return ""
        return f"{self.words}, {self.remat}" + (f", {self.microbatches} microbatches" if self.microbatches > 1 else "")


@dataclass
class Outcome:
    """Why there is no plan; empty if there is one."""

    problem: str = ""


@contextlib.contextmanager
def unless_impossible() -> Iterator[Outcome]:
    """Plan without warnings, because the result says whether a plan fits, and turn errors into an outcome."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        try:
            yield outcome
        except AutoshardError as error:
            outcome.problem = str(error)
        except Exception as error:  # a fault of the planner in one row must not cost the others
            outcome.problem = f"the planner failed: {type(error).__name__}: {error}"


def side_of(made: Any, remat: str, microbatches: int) -> Side:
    found = made.estimate
    predicted = {
        "seconds": found.step_time_us / 1e6,
        "compute_seconds": found.compute_us / 1e6,
        "exposed_seconds": (found.step_time_us - found.compute_us) / 1e6,
        "memory_bytes": found.peak_memory_bytes,
        "host_bytes": found.host_memory_bytes,
        "limit_bytes": made.limit_bytes,
    }
    return Side(made.chosen, remat, microbatches, predicted)


@contextlib.contextmanager
def moved_by_compiler() -> Iterator[None]:
    """Let the compiler choose when loops move slices of stacks in host memory, and their layout.

    Other libraries leave both to it.
    """
    with contextlib.ExitStack() as patches:
        for module in (host_stacks, host_fetches, offload_time):
            patches.enter_context(patch.object(module, "host_moves", lambda program, chip: {}))
        patches.enter_context(patch.object(stack_layouts, "order_on_host", lambda layout, value: ()))
        yield


def with_compiled(
    side: Side,
    made: Any,
    store: Store,
    name: str,
    options: Options | None,
    *,
    alternatives: Sequence[Options] = (),
    compiler_moves: bool = False,
) -> Side:
    """Compile a plan under these options, by default its own, and let the referee judge it.

    With `alternatives`, the plan is scheduled under `options` and under each of them, and compiled under those with the
    fastest schedule. With `compiler_moves`, the compiler moves slices of stacks in host memory (`moved_by_compiler`).
    """
    if made is None:
        return side
    if problem := _not_judged(store.target):
        return replace(side, problem=problem)
    platform = find_target(store.target).platform
    used: Any = made.compiler_options.get(platform, {}) if options is None else options
    predicted = {"step": side.predicted["seconds"], "memory_bytes": side.predicted["memory_bytes"]}
    planned = Planned(name, side.words, side.words, side.remat, side.microbatches, None, predicted)
    try:
        if alternatives:
            used = min((used, *alternatives), key=lambda each: _scheduled_seconds(made, store, each))
        with moved_by_compiler() if compiler_moves else contextlib.nullcontext():
            exported = export_plan(bound_or_error(made.bound).executable, used)
        row = store.finish(planned, used, exported)
    except Exception as error:  # a fault of the export or of the referee in one row must not cost the others
        return replace(side, problem=f"not judged: {type(error).__name__}: {error}")
    return replace(side, compiled=_compiled(row), problem=row.message)


def _scheduled_seconds(made: Any, store: Store, options: Options) -> float:
    """Seconds of a plan's schedule by the roofline; infinite if the compiler does not schedule the plan."""
    job = export_plan(bound_or_error(made.bound).executable, options)
    found = compile_job(job, store.timeout_s, until="schedule")
    return estimated(found, store.target).step["roofline"] if found.kind == "ok" else math.inf


def _not_judged(target: str) -> str:
    """Why the referee does not judge programs of a target; empty if it does."""
    chip = target.partition(":")[0]
    platform = find_target(target).platform
    if "*" in target:
        return "not compiled: the referee does not know the network between slices"
    if chip not in JUDGED:
        return f"not compiled: predicted only on {chip}"
    return missing_compiler(platform) or ""


def _compiled(row: Row) -> dict[str, Any]:
    """The figures of a compiled plan.

    `kind` is `ok`, or how it failed. `seconds` is by measure (`estimate_result.MEASURES`). `memory_bytes` is the
    compiler's peak. `dropped` are the options that the compiler does not know.
    """
    return {
        "kind": row.kind,
        "fits": row.ok,
        "seconds": dict(row.step),
        "exposed_seconds": dict(row.exposed),
        "memory_bytes": row.needed_bytes,
        "limit_bytes": row.limit_bytes,
        "dropped": list(row.dropped),
        "options": dict(row.options),
        "versions": dict(row.versions),
    }
