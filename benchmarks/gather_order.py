"""What `gather=` does to the compiled step of Llama-7B.

    python benchmarks/gather_order.py [v5e:2x4 v5p:2x2x2] [--layers 4] [--batch 8] [--plan fsdp:8] [--remat full]
                                      [--orders auto prefetch sequential] [--scan]

A step of the workload `llama2-7b` with fewer layers, written out or (`--scan`) scanned, is planned with each order,
compiled for the machine under the plan's own options, and judged by `estimate.py`. One line compares each further order
with the first one: all temporaries; the most bytes of gathered parameters that are live at once (`gathered_buffers.py`,
not for scans), and twice the bytes of the largest one; and the ratio of the step times. The table gives temporaries,
peak, and the time of a step, predicted and compiled. Nothing runs. Results are stored in `results/gather_order.json`,
where they replace those of the same program and machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common import RESULTS, Console, Table
from gathered_buffers import gathered_buffers
from gathered_buffers import peak as live_peak
from hlo import read
from judged_steps import estimated, exported

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.models.workloads import workload
from autoshard.sharding.audit import compile_job, missing_compiler
from autoshard.sharding.machines.targets import find_target
from autoshard.train.program.build import workload_step

PATH = RESULTS / "gather_order.json"
ORDERS = ("auto", "prefetch", "sequential")
TIMEOUT_S = 1800.0  # chosen: seconds after which the compiler is stopped


@dataclass(frozen=True)
class Row:
    """A compiled step. Bytes and seconds are of one device.

    Attributes:
        target: the machine.
        program: layers, rows of the batch and remat policy.
        plan: the strategy.
        gather: the order of gathers.
        kind: the compiler's result.
        temp_bytes: temporaries of the compiled program.
        peak_bytes: its peak.
        predicted_bytes: the predicted peak.
        cycles, roofline: seconds of a step by the two measures of `estimate.py`; None where it has none.
        predicted: predicted seconds of a step.
        largest_bytes: bytes of the largest parameter as it is gathered.
        gathered_bytes: the most bytes of gathered parameters that are live at once; None for scans.
        gathered_buffers: how many parameters these are.
    """

    target: str
    program: str
    plan: str
    gather: str
    kind: str
    temp_bytes: float | None
    peak_bytes: float | None
    predicted_bytes: float
    cycles: float | None
    roofline: float | None
    predicted: float
    largest_bytes: float
    gathered_bytes: float | None = None
    gathered_buffers: int | None = None


def row_of(target: str, layers: int, batch: int, words: str, remat: str, gather: str, scan: bool) -> Row:
    """Plan, compile and judge one step."""
    work = workload("llama2-7b").with_(batch_size=batch, layers=layers, scan_layers=scan, remat=remat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(*workload_step(work), target=target, plan=words, donate_argnums=0, gather=gather)
    result = compile_job(exported(made, target), TIMEOUT_S)
    step: Any = {}
    gathered = None
    if result.kind == "ok":
        gathered = None if scan else live_peak(gathered_buffers(read(result.text)))
        step = estimated(result, target).step
    # A layer's largest matrix, in bfloat16. The embedding is looked up, not gathered.
    largest = (
        max(
            math.prod(leaf.shape[1:] if scan and "blocks" in leaf.path else leaf.shape)
            for leaf in made.inputs
            if leaf.role == "parameter" and "embed" not in leaf.path
        )
        * 2.0
    )
    program = f"{layers} layers, {'scanned' if scan else 'written out'}, batch {batch}, {remat}"
    return Row(
        target, program, words, gather, result.kind, result.memory.get("temp"),
        result.peak_bytes, made.estimate.peak_memory_bytes, step.get("cycles"), step.get("roofline"),
        made.estimate.step_time_us / 1e6, largest, gathered and gathered.nbytes, gathered and gathered.buffers,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the steps and print the table."""
    given = _parser().parse_args(arguments)
    stored = [Row(**row) for row in json.loads(PATH.read_text())] if PATH.exists() else []
    rows: list[Row] = []
    for target in given.targets:
        if missing := missing_compiler(find_target(target).platform):
            print(missing, file=sys.stderr)
            continue
        for gather in given.orders:
            new = row_of(target, given.layers, given.batch, given.plan, given.remat, gather, given.scan)
            rows.append(new)
            stored = [row for row in stored if _key(row) != _key(new)] + [new]
            PATH.write_text(json.dumps([asdict(row) for row in stored], indent=1) + "\n")
            if gather != given.orders[0]:
                first = next(row for row in rows if row.target == target)
                print(comparison(first, new), flush=True)
    Console(width=160).print(table(rows))
    return 0


def _key(row: Row) -> tuple[str, ...]:
    return row.target, row.program, row.plan, row.gather


def comparison(first: Row, other: Row) -> str:
    """One line that compares two orders."""
    if first.temp_bytes is None or other.temp_bytes is None:
        return f"{first.target}: {first.gather} {first.kind}, {other.gather} {other.kind}"
    times = [
        f"{name} {two / one:.3f}"
        for name, one, two in (
            ("cycles", first.cycles, other.cycles),
            ("roofline", first.roofline, other.roofline),
            ("predicted", first.predicted, other.predicted),
        )
        if one and two
    ]
    gathered = ""
    if first.gathered_bytes is not None and other.gathered_bytes is not None:
        gathered = (
            f", gathered parameters {first.gathered_bytes / 2**20:.0f} -> {other.gathered_bytes / 2**20:.0f} MiB "
            f"({other.gathered_buffers} at once; two of the largest: {2 * other.largest_bytes / 2**20:.0f} MiB)"
        )
    return (
        f"{first.target}, {first.gather} -> {other.gather}: temporaries {first.temp_bytes / 2**20:.0f} -> "
        f"{other.temp_bytes / 2**20:.0f} MiB{gathered}; time of a step: {', '.join(times)}"
    )


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    found = Table(title="orders of gathers of Llama-7B")
    for name in ("target", "program", "plan", "gather", "result", "temporaries MiB", "gathered MiB", "peak MiB",
                 "predicted MiB",
                 "ms cycles", "ms roofline", "ms predicted"):  # fmt: skip
        found.add_column(name)
    for row in rows:
        sizes = [_text(size, 2**-20) for size in _sizes(row)]
        times = [_text(time, 1e3) for time in (row.cycles, row.roofline, row.predicted)]
        found.add_row(row.target, row.program, row.plan, row.gather, row.kind, *sizes, *times)
    return found


def _sizes(row: Row) -> tuple[float | None, ...]:
    return row.temp_bytes, row.gathered_bytes, row.peak_bytes, row.predicted_bytes


def _text(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", default=["v5e:2x4", "v5p:2x2x2"], help="machines")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="rows of the batch")
    parser.add_argument("--plan", default="fsdp:8")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--scan", action="store_true", help="scan over the layers instead of writing them out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
