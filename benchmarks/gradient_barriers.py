"""Memory and time of steps on TPUs with and without barriers that wait for gradients.

    python benchmarks/gradient_barriers.py                   compile each program both ways
    python benchmarks/gradient_barriers.py head              only these programs; the others stay as stored
    python benchmarks/gradient_barriers.py --show            the stored rows, without compiling

`four` and `one` are eight layers of Mixtral 8x7B with 1024 rows of 4096 tokens. The body of the loop over layers has
four layers, of which the last one keeps less, or one layer. The barriers join the gradients of an operator
(`lower/declared_operators.py`). `head` is four layers of Llama 3.1 8B with 24 rows of 8192 tokens. The barrier joins
the gradient of the head with the carry of the backward loop (`lower/tpu/loop_barriers.py`). Each program is compiled
up to its schedule, with and without the barriers. Nothing runs. Rows are stored in `results/gradient_barriers.json`.
The times are those of the roofline.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from typing import Any, NamedTuple
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
from autoshard.sharding.lower.tpu.loop_barriers import LoopBarriers
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step

FILE = RESULTS / "gradient_barriers.json"
KEEP = "keep:qkv+context+out_proj"
MIXTRAL = {"layers": 8, "context": 4096, "batch_size": 1024}
LLAMA = {"layers": 4, "context": 8192, "batch_size": 24}
POD, FEW = (("v5p:4x8x8", "dp:2 fsdp:128"), ("v6e:16x16", "dp:16 ep:16 state")), (("tpu7x:2x2x1", "fsdp:8"),)
GiB = 2**30


class Program(NamedTuple):
    """A model, its sizes, what its layers keep (one or several words), and the machines with their strategies."""

    model: str
    sizes: Mapping[str, int]
    remat: tuple[str, ...]
    machines: tuple[tuple[str, str], ...]


PROGRAMS = {
    "four": Program("mixtral-8x7b", MIXTRAL, (f"{KEEP},{KEEP},{KEEP},keep:context+out_proj",), POD),
    "one": Program("mixtral-8x7b", MIXTRAL, (KEEP,), POD),
    "head": Program("llama3.1-8b", LLAMA, ("full", KEEP, "host:residual+qkv+out_proj"), FEW),
}


@dataclass(frozen=True)
class Row:
    """A compiled program.

    Attributes:
        program: one of `PROGRAMS`.
        remat: what its layers keep.
        target: the machine.
        words: the strategy.
        waits: whether the program has the barriers.
        seconds: the step time by the roofline.
        peak_bytes: the size of a device's memory space.
        predicted_bytes: the estimate of it.
        date: when it was compiled.
        versions: versions of the compiler's packages.
    """

    program: str
    remat: str
    target: str
    words: str
    waits: bool
    seconds: float
    peak_bytes: float
    predicted_bytes: float
    date: str
    versions: Mapping[str, str]


def without_barriers(program: str) -> AbstractContextManager[Any]:
    """Return a context in which programs are lowered without the barriers that this program is about."""
    if program == "head":
        return patch.object(LoopBarriers, "before", lambda barriers, op, env: None)
    return patch.object(declared_operators, "gives_gradients", lambda op, roles: False)


def compiled(program: str) -> Iterator[Row]:
    """Plan a program for its machines, and compile it both ways."""
    model, sizes, remats, machines = PROGRAMS[program]
    for remat, (target, words) in product(remats, machines):
        step, state, batch = workload_step(workload(model).with_(remat=remat, **sizes))
        made: Any = plan(step, state, batch, target=target, plan=words, donate_argnums=0)
        for waits in (True, False):
            with nullcontext() if waits else without_barriers(program):
                job = export_plan(bound_or_error(made.bound).executable)
            found = compile_job(job, until="schedule")
            step_s = estimated(found, target).step["roofline"]
            figures = step_s, float(found.peak_bytes or 0.0), made.estimate.peak_memory_bytes
            today = datetime.now(UTC).strftime("%Y-%m-%d")
            yield Row(program, remat, target, words, waits, *figures, today, versions())


def show(rows: Sequence[Row]) -> None:
    """Print rows."""
    table = Table("program", "remat", "target", "strategy", "barrier", "roofline ms", "GiB", "predicted GiB")
    for row in rows:
        figures = f"{row.seconds * 1e3:.1f}", f"{row.peak_bytes / GiB:.2f}", f"{row.predicted_bytes / GiB:.2f}"
        table.add_row(row.program, row.remat, row.target, row.words, "yes" if row.waits else "no", *figures)
    Console(width=160).print(table)


def stored_rows() -> list[Row]:
    """Return the stored rows."""
    return [Row(**row) for row in json.loads(FILE.read_text())["rows"]]


def main() -> None:
    """Compile, store and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--show", action="store_true", help="print the stored rows, compile nothing")
    given = parser.parse_args()
    if unknown := [each for each in given.programs if each not in PROGRAMS]:
        parser.error(f"unknown program {unknown[0]!r}; there are {', '.join(PROGRAMS)}")
    if given.show:
        show([row for row in stored_rows() if row.program in (given.programs or PROGRAMS)])
        return
    wanted = given.programs or [*PROGRAMS]
    kept = [row for row in stored_rows() if row.program not in wanted] if FILE.exists() else []
    rows = [*kept, *(row for program in wanted for row in compiled(program))]
    rows.sort(key=lambda row: [*PROGRAMS].index(row.program))
    FILE.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
