"""How much memory XLA's scheduler may use on GPUs, and what that is worth.

    python benchmarks/gpu_scheduler_memory.py              compile each program under each set (extra: aot-cuda)
    python benchmarks/gpu_scheduler_memory.py --show       the stored rows, without compiling

Llama 2 70B trains on 1024 rows of 4096 tokens in four microbatches on h100:32x8 under `fsdp:256`. The programs differ
in what their layers keep: one takes 86 % of the memory, the other a third. Each is compiled without options, with the
set `full-memory`, and with `full-memory` and `gpu-o1`. Nothing runs. The times are those of the roofline. `exposed` is
the time of collectives that no compute hides. Rows are stored in `results/gpu_scheduler_memory.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from common import RESULTS  # sets up the path and the devices first
from judged_steps import estimated
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.audit import compile_job, missing_compiler
from autoshard.sharding.audit.compiler_process import versions
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.machines.options import SETS
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_variants

FILE = RESULTS / "gpu_scheduler_memory.json"
CHIP, TARGET, STRATEGY, MICROBATCHES = "h100", "h100:32x8", "fsdp:256", 4
REMATS = ("keep:qkv+context+out_proj+mlp_in", "keep:qkv+context")
OPTION_SETS: tuple[tuple[str, ...], ...] = ((), ("full-memory",), ("full-memory", "gpu-o1"))
GiB = 2**30


@dataclass(frozen=True)
class Row:
    """A compiled program.

    Attributes:
        remat: what its layers keep.
        sets: the option sets.
        seconds: the step time.
        exposed_seconds: the part of it in which collectives run alone.
        peak_bytes: the compiler's peak.
        predicted_seconds: the planner's estimate of the step time.
        predicted_bytes: its estimate of the peak.
    """

    remat: str
    sets: str
    seconds: float
    exposed_seconds: float
    peak_bytes: float
    predicted_seconds: float
    predicted_bytes: float


def compiled() -> Iterator[Row]:
    """Plan the programs, and compile them under each set."""
    work = workload("llama2-70b").with_(batch_size=1024, context=4096)
    for remat in REMATS:
        how: Any = {"variants": {"remat": [remat], "microbatches": [MICROBATCHES]}, "target": TARGET, "plan": STRATEGY}
        made = plan(*workload_variants(work), donate_argnums=0, **how)
        for names in OPTION_SETS:
            options = {name: value for each in names for name, value in SETS[each].options[CHIP].items()}
            found = compile_job(export_plan(bound_or_error(made.bound).executable, options))
            if found.kind != "ok":
                raise SystemExit(f"{remat} {names}: {found.kind}: {found.message}")
            judged, guess, peak = estimated(found, TARGET), made.estimate, float(found.peak_bytes or 0.0)
            step, exposed = judged.step["roofline"], judged.exposed["roofline"]
            own = guess.step_time_us / 1e6, guess.peak_memory_bytes
            yield Row(remat, "+".join(names) or "none", step, exposed, peak, *own)


def show(rows: Sequence[Row]) -> None:
    """Print rows."""
    table = Table("remat", "sets", "step s", "exposed s", "GiB", "predicted s", "predicted GiB")
    for row in rows:
        times = f"{row.seconds:.2f}", f"{row.exposed_seconds:.2f}"
        own = f"{row.predicted_seconds:.2f}", f"{row.predicted_bytes / GiB:.1f}"
        table.add_row(row.remat, row.sets, *times, f"{row.peak_bytes / GiB:.1f}", *own)
    Console(width=140).print(table)


def main() -> None:
    """Compile, store and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the stored rows, compile nothing")
    if parser.parse_args().show:
        show([Row(**row) for row in json.loads(FILE.read_text())["rows"]])
        return
    if missing := missing_compiler("cuda"):
        raise SystemExit(missing)
    rows = [*compiled()]
    stored = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions(), "rows": [asdict(r) for r in rows]}
    FILE.write_text(json.dumps(stored, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
