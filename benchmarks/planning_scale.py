"""Measure the planning of a large model (Llama-3 8B, for pods). The trace does not count: any lowering needs it, too.

    python benchmarks/planning_scale.py            all measurements, RUNS times in turn
    python benchmarks/planning_scale.py plan v5p:4x4x4 scan_layers=false layers=128        one measurement
    python benchmarks/planning_scale.py search v5p:4x4x4 scan_layers=false                 one with all variants, traced

Each measurement is a new process, so that nothing is cached and the peak memory is that of one plan. Times are CPU
times of all threads, which depend less on other work on the machine than elapsed times do. Planning uses one thread.
The best run of each counts; its elapsed time is in the note. 512 chips do not divide the workload's batch of 128, so
the plan prices its padding, too. They do divide 1024 rows.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from common import Row, report

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.planner.planning import plan_traced
from autoshard.sharding.program.tracing import trace
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.program.workload_search import workload_search

MODEL = "llama3-8b"
RUNS, TIMEOUT_S = 2, 600  # chosen, not measured: runs of each measurement, and the time limit of one
SMALL, LARGE = "v5p:4x4x4", "v5p:8x8x8"
LIMIT_BYTES = 2e9  # target of the peak memory of one process; chosen


@dataclass(frozen=True)
class Measured:
    """The figures of one process: CPU seconds and elapsed seconds (`clock`) of each stage, and its peak memory."""

    seconds: dict[str, float]
    clock: dict[str, float]
    peak_bytes: float
    chosen: str = ""


def main() -> None:
    """Measure and report. With arguments, print one measurement as JSON."""
    if sys.argv[1:]:
        kind, target, *changes = sys.argv[1:]
        fields = {name: json.loads(value) for name, _, value in (each.partition("=") for each in changes)}
        measure = {"lower": lowered, "plan": planned, "search": searched}[kind]
        print(json.dumps(vars(measure(target, fields))))
        return
    unrolled, deep = ("scan_layers=false",), ("scan_layers=false", "layers=128")
    cases = {
        "scanned, lowered": ("lower", ""),
        "32 unrolled layers, lowered": ("lower", "", *unrolled),
        "scanned, 64 chips": ("plan", SMALL),
        "scanned, 512 chips": ("plan", LARGE),
        "32 unrolled layers, 64 chips": ("plan", SMALL, *unrolled),
        "32 unrolled layers, 512 chips": ("plan", LARGE, *unrolled),
        "128 unrolled layers, 64 chips": ("plan", SMALL, *deep),
        "scanned, 64 chips, all variants": ("search", SMALL),
        "32 unrolled layers, 64 chips, all variants": ("search", SMALL, *unrolled),
        "32 unrolled layers, 512 chips, 1024 rows": ("plan", LARGE, *unrolled, "batch_size=1024"),
    }
    runs = [{name: in_a_process(arguments) for name, arguments in cases.items()} for _ in range(RUNS)]
    best = {name: min((run[name] for run in runs), key=lambda m: sum(m.seconds.values())) for name in cases}
    context = {name: vars(found) for name, found in best.items()}
    report("planning_scale", rows_of(best), model=MODEL, runs=RUNS, batch=workload(MODEL).batch_size, measured=context)


def rows_of(best: dict[str, Measured]) -> list[Row]:
    """Return the figures with their targets."""
    rows = []
    for name in ("scanned", "32 unrolled layers"):
        for what in ("trace", "lower"):
            rows.append(_row(best[f"{name}, lowered"], f"{name}: {what}", what))
    limits = {"scanned, 64 chips": 2.0, "32 unrolled layers, 64 chips": 10.0}
    plans = {name: found for name, found in best.items() if "plan" in found.seconds}
    rows += [
        _row(found, f"{name}: planning beyond the trace", "plan", limits.get(name)) for name, found in plans.items()
    ]
    for name in ("scanned, 64 chips, all variants", "32 unrolled layers, 64 chips, all variants"):
        rows.append(_row(best[name], f"{name}: tracing and planning", "search", 10.0 if "unrolled" in name else None))
    took = {name: found.seconds["plan"] for name, found in plans.items()}
    small, layers = took["32 unrolled layers, 64 chips"], best["32 unrolled layers, lowered"].seconds
    rows += [
        Row("32 unrolled layers: planning / (trace + lower)", small / sum(layers.values()), "x", 2.0),
        Row("128 unrolled layers / 32", took["128 unrolled layers, 64 chips"] / small, "x", 4.5),
        Row("512 chips / 64, scanned", took["scanned, 512 chips"] / took["scanned, 64 chips"], "x", 2.0),
        Row("512 chips / 64, 32 unrolled layers", took["32 unrolled layers, 512 chips"] / small, "x", 2.0),
        Row("512 chips / 64, 8 times the rows", took["32 unrolled layers, 512 chips, 1024 rows"] / small, "x", 2.0),
    ]
    peak, name = max((found.peak_bytes, name) for name, found in plans.items())
    return [*rows, Row("peak memory of the largest process", peak / 1e9, "GB", LIMIT_BYTES / 1e9, note=name)]


def _row(found: Measured, name: str, what: str, limit: float | None = None) -> Row:
    return Row(name, found.seconds[what], "s", limit, note=f"{found.clock[what]:.1f} s elapsed")


def in_a_process(arguments: tuple[str, ...]) -> Measured:
    """Run one measurement, by this file in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def lowered(target: str, fields: dict[str, Any]) -> Measured:
    """Measure tracing and lowering of the step with JAX alone. The target does not matter."""
    step, state, batch = workload_step(workload(MODEL).with_(**fields))
    spent = Spent()
    traced = spent.on("trace", lambda: jax.jit(step).trace(state, batch))
    spent.on("lower", traced.lower)
    return spent.measured()


def planned(target: str, fields: dict[str, Any]) -> Measured:
    """Measure planning of the traced step for a machine."""
    step, state, batch = workload_step(workload(MODEL).with_(**fields))
    spent = Spent()
    traced = spent.on("trace", lambda: trace(step, (state, batch), {}, (0,)))
    bound = spent.on("plan", lambda: plan_traced(traced, ((state, batch), {}), target=target))
    return spent.measured(bound.plan.chosen)


def searched(target: str, fields: dict[str, Any]) -> Measured:
    """Measure planning with the search over what layers keep, recompute or offload, and microbatches."""
    work = workload(MODEL).with_(**fields)
    step, *shapes = workload_variants(work)
    spent = Spent()
    search = workload_search(work, {"target": target})
    made = spent.on("search", lambda: plan(step, *shapes, target=target, variants=search, donate_argnums=0))
    return spent.measured(f"{made.chosen}, {made.variant}")


class Spent:
    """The seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.clock: dict[str, float] = {}

    def on(self, name: str, action: Callable[[], Any]) -> Any:
        """Run a stage, record its time and return its result."""
        processor, clock = time.process_time(), time.perf_counter()
        result = action()
        self.seconds[name], self.clock[name] = time.process_time() - processor, time.perf_counter() - clock
        return result

    def measured(self, chosen: str = "") -> Measured:
        """Return all times, and the peak memory so far."""
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Measured(self.seconds, self.clock, kilobytes * 1024.0, chosen)


if __name__ == "__main__":
    main()
