"""Memory and time of steps on TPUs with and without barriers between gradients (`lower/declared_operators.py`).

    python benchmarks/gradient_barriers.py                   compile each case both ways
    python benchmarks/gradient_barriers.py --show            the stored rows, without compiling

Eight layers of Mixtral 8x7B train on 1024 rows of 4096 tokens. The body of the loop over layers has four layers, of
which the last one keeps less (`four`), or one layer (`one`). Each program is compiled up to its schedule, with and
without the optimization barrier. Nothing runs. Rows are stored in `results/gradient_barriers.json`. The times are
those of the roofline.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

from common import RESULTS  # sets up the path and the devices first
from judged_steps import estimated
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.audit import compile_job
from autoshard.sharding.audit.compiler_process import versions
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.lower import declared_operators
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step

FILE = RESULTS / "gradient_barriers.json"
KEEP = "keep:qkv+context+out_proj"
BODIES = {"four": f"{KEEP},{KEEP},{KEEP},keep:context+out_proj", "one": KEEP}
CASES = (("v5p:4x8x8", "dp:2 fsdp:128"), ("v6e:16x16", "dp:16 ep:16 state"))
SIZES = {"layers": 8, "context": 4096, "batch_size": 1024}
GiB = 2**30


@dataclass(frozen=True)
class Row:
    """A compiled program.

    Attributes:
        body: the layers in the body of the loop.
        target: the machine.
        words: the strategy.
        waits: whether the gradients wait for each other.
        seconds: the step time by the roofline.
        peak_bytes: the size of a device's memory space.
        predicted_bytes: the estimate of it.
    """

    body: str
    target: str
    words: str
    waits: bool
    seconds: float
    peak_bytes: float
    predicted_bytes: float


def compiled(body: str, target: str, words: str) -> list[Row]:
    """Plan a case, and compile it both ways."""
    step, state, batch = workload_step(workload("mixtral-8x7b").with_(remat=BODIES[body], **SIZES))
    made: Any = plan(step, state, batch, target=target, plan=words, donate_argnums=0)
    rows = []
    for waits in (True, False):
        without = patch.object(declared_operators, "gives_gradients", lambda op, roles: False)
        with nullcontext() if waits else without:
            job = export_plan(bound_or_error(made.bound).executable)
        found = compile_job(job, until="schedule")
        step_s = estimated(found, target).step["roofline"]
        peak = float(found.peak_bytes or 0.0)
        rows.append(Row(body, target, words, waits, step_s, peak, made.estimate.peak_memory_bytes))
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print rows."""
    table = Table("layers in the body", "target", "strategy", "barrier", "roofline ms", "GiB", "predicted GiB")
    for row in rows:
        figures = f"{row.seconds * 1e3:.0f}", f"{row.peak_bytes / GiB:.2f}", f"{row.predicted_bytes / GiB:.2f}"
        table.add_row(row.body, row.target, row.words, "yes" if row.waits else "no", *figures)
    Console(width=120).print(table)


def main() -> None:
    """Compile, store and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the stored rows, compile nothing")
    if parser.parse_args().show:
        show([Row(**row) for row in json.loads(FILE.read_text())["rows"]])
        return
    rows = [row for body in BODIES for case in CASES for row in compiled(body, *case)]
    stored = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions(), "rows": [asdict(r) for r in rows]}
    FILE.write_text(json.dumps(stored, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
