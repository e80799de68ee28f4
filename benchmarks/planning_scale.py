"""Measure the planning of large models for pods; of Llama-3 8B, where no other is named.

The trace does not count in planning, because any lowering needs it, too. It counts where variants are searched.

    python benchmarks/planning_scale.py            all measurements, RUNS times in turn
    python benchmarks/planning_scale.py plan v5p:4x4x4 scan_layers=false layers=128        one measurement
    python benchmarks/planning_scale.py search v5p:4x4x4 scan_layers=false                 one with all variants, traced
    python benchmarks/planning_scale.py search tpu7x:4x4x4 model=gpt-oss-120b              of another named model
    python benchmarks/planning_scale.py search v5p:8x8x4 model=FOLDER                      of a folder's config.json

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
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from common import Row, report

from autoshard import plan
from autoshard.models.pretrained.workload import folder_workload
from autoshard.models.workloads import Workload, workload
from autoshard.sharding.planner.planning import plan_traced
from autoshard.sharding.program.tracing import trace
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.program.workload_search import workload_search

MODEL = "llama3-8b"
CONFIG_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
"""The config.json of Llama 3.1 70B, as Meta published it."""
OF_CONFIG, OF_PATTERNS = (
    "70B from its config, 256 chips",
    {
        "gemma3-12b, 6 layers in turn, 256 chips": ("gemma3-12b", "v6e:16x16"),
        "gpt-oss-120b, 2 layers in turn, 64 chips": ("gpt-oss-120b", "tpu7x:4x4x4"),
    },
)
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
        fields = {name: _value(text) for name, _, text in (each.partition("=") for each in changes)}
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
    cases |= {name: ("search", target, f"model={model}") for name, (model, target) in OF_PATTERNS.items()}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG_70B))
        cases[OF_CONFIG] = "search", "v5p:8x8x4", f"model={folder}"
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
    rows.append(_row(best[OF_CONFIG], f"{OF_CONFIG}: tracing and planning", "search", 10.0))
    rows += [_row(best[name], f"{name}: tracing and planning", "search") for name in OF_PATTERNS]
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
    step, state, batch = workload_step(_work(fields))
    spent = Spent()
    traced = spent.on("trace", lambda: jax.jit(step).trace(state, batch))
    spent.on("lower", traced.lower)
    return spent.measured()


def planned(target: str, fields: dict[str, Any]) -> Measured:
    """Measure planning of the traced step for a machine."""
    step, state, batch = workload_step(_work(fields))
    spent = Spent()
    traced = spent.on("trace", lambda: trace(step, (state, batch), {}, (0,)))
    bound = spent.on("plan", lambda: plan_traced(traced, ((state, batch), {}), target=target))
    return spent.measured(bound.plan.chosen)


def searched(target: str, fields: dict[str, Any]) -> Measured:
    """Measure planning with the search over what layers keep, recompute or offload, and microbatches."""
    work = _work(fields)
    step, *shapes = workload_variants(work)
    spent = Spent()
    search = workload_search(work, {"target": target})
    made = spent.on("search", lambda: plan(step, *shapes, target=target, variants=search, donate_argnums=0))
    return spent.measured(f"{made.chosen}, {made.variant}")


def _work(fields: dict[str, Any]) -> Workload:
    """Return the workload with these fields. `model` is the name of another model, or a folder with a config.json."""
    model = fields.pop("model", MODEL)
    return (folder_workload(model) if Path(model).is_dir() else workload(model)).with_(**fields)


def _value(text: str) -> Any:
    """Return a value of the command line: JSON, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


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
