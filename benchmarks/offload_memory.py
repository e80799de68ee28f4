"""The smallest memory that a step reaches with offload, and what it costs, as compiled.

    python benchmarks/offload_memory.py                            # all cases
    python benchmarks/offload_memory.py gpt-1.3b --timeout 600     # one case
    python benchmarks/offload_memory.py --schedule                 # by their schedules
    python benchmarks/offload_memory.py --show                     # the stored rows, without compiling

For each case, under one strategy and without microbatches, the memory limit is lowered below the peak of each plan,
once with `offload="none"` and once with `offload="auto"`, until no plan fits, or the plan is predicted to take more
than 1.10 of the time of full rematerialization without a limit. The last plan of each descent is compiled, and so is
full rematerialization. `estimate.py` gives the times, the compiler the peaks:

    memory = compiled peak with "auto" / with "none"                        it must be at most 0.75
    time   = compiled step time with "auto" / of full rematerialization     it must be at most 1.10

The peak is the compiler's: for a program with values on the host, or without machine code, the size of the device's
memory space. `allocated` is the ratio of all arguments and temporaries, not all of which are in use at the same time.
With `--schedule`, the compiler stops before machine code (`compile_job`). A program then takes seconds instead of
minutes. It is judged by the roofline only, and `allocated` is unknown. Each program with values on the host is also
compiled with the option set `host-transfers`, as `verify` does, and the faster one counts.

Nothing runs. Rows are stored in `results/offload_memory/` one by one. The exit code is 1 if a ratio is larger.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
from common import Console, Table
from offload_auto import best, compiled
from plan_rows import Store, run_cases
from plan_rows import best as fastest

from autoshard import plan
from autoshard.errors import PlanError
from autoshard.models.workloads import workload
from autoshard.sharding.machines.options.choice import named_set
from autoshard.train.program.build import workload_variants

FOLDER = common.RESULTS / "offload_memory"
MOST_MEMORY, MOST_TIME = 0.75, 1.10  # the largest allowed ratios
TRANSFERS = "host-transfers"  # the option set
STEP_DOWN = 0.995  # chosen: the next limit, as a share of the last plan's peak
GiB = 2**30


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: the name of the workload.
        target: the machine.
        strategy: the strategy of all its plans.
        sizes: fields of the workload: layers, batch size, context.
    """

    model: str
    target: str
    strategy: str
    sizes: Mapping[str, Any]

    @property
    def work(self) -> Any:
        """The workload."""
        return workload(self.model).with_(**self.sizes)

    @property
    def unlimited(self) -> Any:
        """The plan of full rematerialization without a memory limit."""
        step, *shapes = workload_variants(self.work)
        options = {
            "target": self.target,
            "plan": self.strategy,
            "donate_argnums": 0,
            "memory_limit_bytes": float("inf"),
        }
        return plan(step, *shapes, variants={"remat": ["full"], "microbatches": [1]}, **options)


CASES: Mapping[str, Case] = {
    case.model: case
    for case in (
        Case("gpt-1.3b", "v5e:4x4", "fsdp:16", {"batch_size": 512, "context": 1024, "loss_chunks": 16}),
        Case("llama2-7b", "v6e:4x4", "fsdp:16", {"batch_size": 128, "context": 4096, "loss_chunks": 16}),
    )
}


def leanest(case: Case, offload: str, full: Any) -> Any:
    """The last plan of a descent, of those that are predicted to take at most `MOST_TIME` of full rematerialization."""
    found, limit = full, full.estimate.peak_memory_bytes
    while True:
        try:
            made = best(case, offload, limit)
        except PlanError:
            return found
        if made.estimate.step_time_us > MOST_TIME * full.estimate.step_time_us:
            return found
        found, limit = made, STEP_DOWN * made.estimate.peak_memory_bytes


def rows_of(store: Store) -> None:
    """Compile the plans of a case."""
    case, made = CASES[store.case], {}
    made["full"] = case.unlimited
    made |= {side: leanest(case, side, made["full"]) for side in ("none", "auto")}
    peaks = {side: each.estimate.peak_memory_bytes for side, each in made.items()}
    store.notes = {
        "strategy": case.strategy,
        "sizes": dict(case.sizes),
        **{
            side: f"{each.variant['remat']}, {each.estimate.step_time_us / 1e3:.1f} ms and "
            f"{peaks[side] / GiB:.2f} GiB predicted"
            for side, each in made.items()
        },
    }
    store.begin()
    store.save()
    for side, each in made.items():
        compiled(store, side, each)
        if each.estimate.host_traffic_bytes:
            chip = case.target.partition(":")[0]
            compiled(store, side, each, named_set(TRANSFERS, chip).options[chip])


def ratios(store: Store) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
    """Return the ratios of memory and of times, by measure; None if a program did not compile."""
    rows = {side: fastest([row for row in store.rows if row.side == side]) for side in ("full", "none", "auto")}
    full, none, auto = rows.values()
    if full is None or none is None or auto is None:
        return None
    sizes = {"allocated": (auto.memory_bytes, none.memory_bytes), "peak": (auto.peak_bytes, none.peak_bytes)}
    memory = {name: one / other for name, (one, other) in sizes.items() if one and other}
    return memory, {measure: seconds / full.step[measure] for measure, seconds in auto.step.items()}


def show(stores: Sequence[Store]) -> int:
    """Print the rows; return 1 if a ratio is too large, or is unknown."""
    table = Table("model", "target", "full", "leanest: none", "leanest: auto", "compiled: memory", "time", "verdict")
    failed = 0
    for store in stores:
        notes, found = store.notes, ratios(store)
        good = found is not None and found[0]["peak"] <= MOST_MEMORY and max(found[1].values()) <= MOST_TIME
        failed |= not good
        memory, time = ("-", "-") if found is None else (
            ", ".join(f"{value:.3f} by {measure}" for measure, value in each.items()) for each in found
        )  # fmt: skip
        texts = [notes.get(side) for side in ("full", "none", "auto")]
        table.add_row(store.case, store.target, *texts, memory, time, "ok" if good else "missed")
    Console(width=180).print(table)
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """Compile and print the cases."""
    targets = {name: case.target for name, case in CASES.items()}
    return run_cases(arguments, __doc__, targets, FOLDER, rows_of, show, schedule=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
