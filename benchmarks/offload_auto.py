"""What `offload="auto"` costs where a step fits without it, as compiled.

    python benchmarks/offload_auto.py                            # all cases
    python benchmarks/offload_auto.py gpt-1.3b --timeout 600     # one case
    python benchmarks/offload_auto.py --schedule                 # by their schedules
    python benchmarks/offload_auto.py --show                     # the stored rows, without compiling

Each case is a step of a model with few layers under `fsdp:8`, with a memory limit between the peaks of full
rematerialization and of no recomputation at all. So full rematerialization fits, and offload may pay. The best variant
with `offload="auto"` and the best one with `offload="none"` are compiled, and `estimate.py` judges both:

    ratio = compiled step time with "auto" / compiled step time with "none"      it must be at most 1.01

If both choices are the same program, the ratio is 1 and nothing is compiled. With `--schedule`, the compiler
stops before machine code (`compile_job`). A program then takes seconds instead of minutes and is judged by the roofline
only. Nothing runs. Rows are stored in `results/offload_auto/` one by one. The exit code is 1 if a ratio is larger.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
from common import Console, Table
from plan_rows import Planned, Row, Store, prediction, run_cases

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.program.workload_search import workload_search

FOLDER = common.RESULTS / "offload_auto"
MOST = 1.01  # the largest allowed ratio
STRATEGY = "fsdp:8"


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: the name of the workload.
        target: the machine.
        share: the memory limit, as a share of the way from the peak of full rematerialization to that of none.
        sizes: fields of the workload: layers, batch size, context.
        strategy: the strategy of both plans.
    """

    model: str
    target: str
    share: float
    sizes: Mapping[str, Any]
    strategy: str = STRATEGY

    @property
    def work(self) -> Any:
        """The workload."""
        return workload(self.model).with_(**self.sizes)

    def limit_bytes(self) -> float:
        """The memory limit in bytes of a device."""
        peaks = []
        for remat in ("full", "none"):
            step, *shapes = workload_step(self.work.with_(remat=remat), 1)
            made = plan(step, *shapes, target=self.target, plan=self.strategy, donate_argnums=0)
            peaks.append(made.estimate.peak_memory_bytes)
        return peaks[0] + self.share * (peaks[1] - peaks[0])


LLAMA3 = {"layers": 4, "batch_size": 16, "context": 8192}
CASES: Mapping[str, Case] = {
    "gpt-1.3b": Case("gpt-1.3b", "v5e:2x4", 0.02, {"layers": 4, "batch_size": 32, "context": 512}),
    "llama-7b": Case("llama-7b", "v6e:2x4", 0.02, {"layers": 3, "batch_size": 64, "context": 512}),
    "gpt-2.6b": Case("gpt-2.6b", "v6e:2x4", 0.05, {"layers": 4, "batch_size": 64, "context": 512}),
    "llama3.1-8b": Case("llama3.1-8b", "v6e:2x4", 0.0, LLAMA3),
    "llama3.1-8b-v5e": Case("llama3.1-8b", "v5e:2x4", 0.02, {**LLAMA3, "batch_size": 8}),
    "mistral-7b": Case("mistral-7b", "v6e:2x4", 0.02, LLAMA3),
}


def best(case: Any, offload: str, limit: float) -> Any:
    """The best variant of a case: of anything with its target, strategy and workload."""
    options = {"target": case.target, "plan": case.strategy, "memory_limit_bytes": limit}
    step, *shapes = workload_variants(case.work)
    search = workload_search(case.work, options, offload=offload, microbatches=1)
    return plan(step, *shapes, donate_argnums=0, variants=search, **options)


def rows_of(store: Store) -> list[Row]:
    """The compiled rows of a case: `auto` and `none`; one row, `same`, if both are the same variant."""
    case = CASES[store.case]
    limit = case.limit_bytes()
    made = {offload: best(case, offload, limit) for offload in ("auto", "none")}
    store.notes = {
        "limit_bytes": limit,
        "sizes": dict(case.sizes),
        **{side: f"{p.variant['remat']}, {p.estimate.step_time_us / 1e3:.1f} ms predicted" for side, p in made.items()},
    }
    store.begin()
    if made["auto"].variant == made["none"].variant:
        store.notes["same"] = True
        store.save()
        return []
    store.notes.pop("same", None)
    return [compiled(store, side, each) for side, each in made.items()]


def compiled(store: Store, side: str, made: Any, options: Mapping[str, Any] | None = None) -> Row:
    """Compile a plan, with these options beside its own, and store its row."""
    used = {**made.compiler_options.get(find_target(store.target).platform, {}), **(options or {})}
    planned = Planned(side, made.chosen, made.chosen, made.variant["remat"], 1, None, prediction(made))
    return store.finish(planned, used, export_plan(bound_or_error(made.bound).executable, used))


def ratios(store: Store) -> dict[str, float]:
    """Measure -> compiled step time with `auto` over that with `none`; empty if a program did not compile."""
    if store.notes.get("same"):
        return {"same": 1.0}
    sides = {row.side: row for row in store.rows if row.kind == "ok"}
    if len(sides) < 2:
        return {}
    return {measure: us / sides["none"].step[measure] for measure, us in sides["auto"].step.items()}


def show(stores: Sequence[Store]) -> int:
    """Print the rows; return 1 if a ratio exceeds `MOST` by both measures, or is unknown."""
    table = Table("model", "target", "auto", "none", "compiled: auto / none", "verdict")
    failed = 0
    for store in stores:
        found = ratios(store)
        good = bool(found) and max(found.values()) <= MOST
        failed |= not good
        text = ", ".join(f"{value:.3f} by {measure}" for measure, value in found.items()) or "not compiled"
        notes = store.notes
        table.add_row(store.case, store.target, notes.get("auto"), notes.get("none"), text, "ok" if good else "slower")
    Console(width=160).print(table)
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """Compile and print the cases."""
    targets = {name: case.target for name, case in CASES.items()}
    return run_cases(arguments, __doc__, targets, FOLDER, rows_of, show, schedule=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
