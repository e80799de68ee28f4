"""Microbatches that the planner cuts out of a step, against those that the trainer's own step writes by hand.

    python benchmarks/microbatches.py [v5e:2x4] [--model gpt-1.3b] [--layers 4] [--batch 64] [--count 4] [--plan fsdp:8]

A workload with fewer layers is compiled for the machine in three ways: with the whole batch, with the microbatches of
`make_train_step`, and with `microbatches=` of the planner, which sees only the whole step. One line a machine compares
the last two: temporaries, and the time of a step by `estimate.py`. Nothing runs. Results are stored in
`results/microbatches.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common import RESULTS, Console, Table
from judged_steps import JudgedStep, judged, scaled_text

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.models.workloads import workload
from autoshard.sharding.audit import missing_compiler
from autoshard.sharding.machines.targets import find_target
from autoshard.train.program.build import workload_step

PATH = RESULTS / "microbatches.json"


@dataclass(frozen=True, kw_only=True)
class Row(JudgedStep):
    """A compiled step.

    Attributes:
        target: the machine.
        program: model, layers and rows of the batch.
        plan: the strategy.
        way: `whole`, `by hand` or `cut`.
    """

    target: str
    program: str
    plan: str
    way: str


def row_of(target: str, given: Any, way: str) -> Row:
    """Plan, compile and judge one step."""
    work = workload(given.model).with_(batch_size=given.batch, layers=given.layers)
    step = workload_step(work, given.count if way == "by hand" else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(*step, target=target, plan=given.plan, donate_argnums=0,
                    microbatches=given.count if way == "cut" else 1)  # fmt: skip
    program = f"{given.model}, {given.layers} layers, batch {given.batch}, {given.count} microbatches"
    return Row(target=target, program=program, plan=given.plan, way=way, **judged(made, target))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the steps and print the table."""
    given = _parser().parse_args(arguments)
    rows: list[Row] = []
    for target in given.targets:
        if missing := missing_compiler(find_target(target).platform):
            print(missing, file=sys.stderr)
            continue
        rows += [row_of(target, given, way) for way in ("whole", "by hand", "cut")]
        print(comparison(*rows[-2:]), flush=True)
        PATH.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    Console(width=160).print(table(rows))
    return 0


def comparison(hand: Row, cut: Row) -> str:
    """One line that compares both ways."""
    if hand.temp_bytes is None or cut.temp_bytes is None:
        return f"{hand.target}: {hand.kind}, {cut.kind}"
    pairs = [(name, getattr(hand, name), getattr(cut, name)) for name in ("cycles", "roofline", "predicted")]
    times = ", ".join(f"{name} {two / one:.3f}" for name, one, two in pairs if one and two)
    return f"{hand.target}: cut / by hand: temporaries {cut.temp_bytes / hand.temp_bytes:.3f}, time of a step: {times}"


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    found = Table(title="microbatches")
    for name in ("target", "program", "plan", "way", "result", "temporaries MiB", "predicted peak MiB", "ms cycles",
                 "ms roofline", "ms predicted"):  # fmt: skip
        found.add_column(name)
    for row in rows:
        sizes = [scaled_text(size, 2**-20) for size in (row.temp_bytes, row.predicted_bytes)]
        times = [scaled_text(time, 1e3) for time in (row.cycles, row.roofline, row.predicted)]
        found.add_row(row.target, row.program, row.plan, row.way, row.kind, *sizes, *times)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", default=["v5e:2x4"], help="machines")
    parser.add_argument("--model", default="gpt-1.3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="rows of the batch")
    parser.add_argument("--count", type=int, default=4, help="number of microbatches")
    parser.add_argument("--plan", default="fsdp:8")
    return parser


if __name__ == "__main__":
    sys.exit(main())
