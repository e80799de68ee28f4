"""Compiled plans that show what the ranking of plans adds to their estimated time.

    python benchmarks/ranked_plans.py [CASE ...]    compile the plans of these cases; default: all
    python benchmarks/ranked_plans.py --show        the stored rows, without compiling

Plans that almost fill the memory are slower than estimated (`sharding/plan/memory_doubt.py`). Plans that move values to
the host may expose more of these transfers than estimated (`HOST_DOUBT` in `train/program/constants.py`). Each row is a
fixed plan of a workload:

    share       estimated peak, as a share of the device's memory
    estimate    estimated seconds of a step
    joined      seconds of the compiled step, by the joined measure of `estimate.py`
    copies      seconds of copies that the compiled step exposes, and the estimate
    doubt       their difference, as a fraction of the time on the link to the host

Nothing runs. Rows are stored in `results/ranked_plans/`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import common  # sets up the path and the devices first
from gallery_models import gallery_workload
from plan_rows import Planned, Store, prediction, run_cases
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_variants

FOLDER = common.RESULTS / "ranked_plans"


@dataclass(frozen=True)
class Case:
    """Plans of a workload.

    Attributes:
        model: the name of the workload.
        target: the machine.
        words: the strategy.
        remats: for each plan, the remat policy of the layers.
        microbatches: the number of microbatches.
        sizes: fields of the workload; if there are none, it has the sizes of the gallery.
    """

    model: str
    target: str
    words: str
    remats: Sequence[str]
    microbatches: int = 1
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> Any:
        """The workload."""
        return workload(self.model).with_(**self.sizes) if self.sizes else gallery_workload(self.model, self.target)


CASES: Mapping[str, Case] = {
    case.model: case
    for case in (
        Case(
            "gpt-2.6b", "v5e:4x4", "dp:2 fsdp:8", ("keep:mlp_in", "host:context keep:out_proj+mlp_in"), 4,
            {"batch_size": 512, "attention": "auto"},
        ),
        Case(
            "gpt-1.3b", "v5e:4x4", "fsdp:16", ("full", "host:residual"),
            sizes={"batch_size": 512, "context": 1024, "loss_chunks": 16},
        ),
        Case(
            "gpt3-175b", "v5p:4x8x8", "dp:2 fsdp:128",
            ("host:out_proj keep:qkv+mlp_in,host:mlp_in keep:qkv+out_proj",), 4,
        ),
        Case("llama3.1-405b", "v5p:4x8x8", "fsdp:256", ("host:residual+out_proj keep:qkv",), 2),
    )
}  # fmt: skip


def compile_rows(store: Store) -> None:
    """Compile and store the plans of a case."""
    case = CASES[store.case]
    store.begin()
    for remat in case.remats:
        compile_row(case, remat, "plan", store)


def compile_row(case: Case, remat: str, side: str, store: Store) -> None:
    """Plan a case with one of its policies, and compile and store the plan as the row of `side`."""
    step, *shapes = workload_variants(case.work)
    variants = {"remat": [remat], "microbatches": [case.microbatches]}
    made = plan(step, *shapes, target=case.target, plan=case.words, donate_argnums=0, variants=variants)
    host = {"host": made.estimate.host_us / 1e6, "host_exposed": made.estimate.host_exposed_us / 1e6}
    row = Planned(side, case.words, made.chosen, remat, case.microbatches, None, prediction(made) | host)
    options = made.compiler_options.get("tpu", {})
    store.finish(row, options, export_plan(bound_or_error(made.bound).executable, options))


def show(stores: Sequence[Store]) -> int:
    """Print the rows."""
    table = Table("case", "remat", "share", "estimate s", "joined s", "copies s", "estimated", "doubt", "result")
    for store in stores:
        for row in store.rows:
            known, copies = row.predicted, row.copies.get("joined", 0.0)
            share = f"{known['memory_bytes'] / row.limit_bytes:.3f}" if row.limit_bytes else ""
            joined = f"{row.step['joined']:.3f}" if row.step else ""
            doubt = f"{(copies - known['host_exposed']) / known['host']:.3f}" if known["host"] else ""
            table.add_row(
                store.case, row.remat, share, f"{known['step']:.3f}", joined, f"{copies:.3f}",
                f"{known['host_exposed']:.3f}", doubt, row.kind,
            )  # fmt: skip
    Console(width=180).print(table)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Compile and print the cases."""
    targets = {name: case.target for name, case in CASES.items()}
    return run_cases(arguments, __doc__, targets, FOLDER, compile_rows, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
