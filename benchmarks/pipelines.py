"""Pipelines that the planner cuts out of a step: memory and idle time as compiled, against the schedule's table.

    python benchmarks/pipelines.py [--schedules alone gpipe 1f1b zb ftb] [--microbatches 8 16] [--layers 4]
                                   [--seq 1024] [--data dp:4] [--gather once] [--show]
    python benchmarks/pipelines.py --schedules interleaved:2 --layers 8

A Llama in plain JAX is planned for v5e:4x4 with `pp:4` and the words of `--data`, and compiled. The work of one stage
is also compiled without a pipeline: a quarter of the layers and of the vocabulary on v5e:2x2, the same microbatches in
turn. This is the schedule `alone`; its time is the ideal time of a pipeline. It is compiled if its row is not stored.
The schedule's table says how much longer a pipeline takes. `step / table` divides the compiled step by the ideal time
multiplied by this factor. Times are the two measures of `estimate.py`. `peak` is the compiler's own. Nothing runs.
Results are stored in `results/pipelines.json`, one row for each schedule, number of microbatches and of layers, words
of `--data`, and word of `--gather`. With `fsdp:4`, no stage alone is compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import plain_models
from common import RESULTS, Console, Table
from judged_steps import JudgedStep, compiled, judged, scaled_text

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit import missing_compiler
from autoshard.sharding.pipeline.schedule_words import make_schedule, read_schedule
from autoshard.sharding.pipeline.schedules import BACKWARD, FORWARD, RECOMPUTE, SCHEDULES, WEIGHTS
from autoshard.sharding.plan.gather_words import WORDS

PATH = RESULTS / "pipelines.json"
STAGES, DEVICES, VOCAB, ROWS = 4, "v5e:4x4", 32768, 4  # rows of a microbatch, one for each device of a stage
ALONE, ALONE_WORD = "v5e:2x2", "alone"  # its target, and its name among the schedules
# The work of the parts of a stage under full rematerialization, in forward passes: its products and their gradients.
COSTS = {FORWARD: 1.0, RECOMPUTE: 1.0, BACKWARD: 3.0}
SPLIT_COSTS = {FORWARD: 1.0, BACKWARD: 2.0, WEIGHTS: 1.0}


@dataclass(frozen=True, kw_only=True)
class Row(JudgedStep):
    """A compiled step.

    Attributes:
        schedule: the schedule, or `alone` for one stage alone.
        microbatches: number of microbatches.
        layers: number of layers of all stages.
        factor: how much longer than its work a pipeline takes, by the schedule's table.
        peak_bytes: the compiler's own peak of one device.
        data: the words beside `pp:4`.
        gather: the word of `gather=`.
    """

    schedule: str
    microbatches: int
    layers: int
    factor: float
    peak_bytes: float | None
    data: str = "dp:4"
    gather: str = "auto"

    @property
    def key(self) -> tuple[object, ...]:
        """What tells the rows apart."""
        return self.schedule, self.microbatches, self.layers, self.data, self.gather


def row_of(given: Any, schedule: str, count: int) -> Row:
    """Plan, compile and judge one step; `alone` is one stage without a pipeline."""
    alone = schedule == ALONE_WORD
    part = STAGES if alone else 1
    step, state, batch = plain_models.llama(
        "full", rows=ROWS * count, seq=given.seq, layers=given.layers // part, vocab=VOCAB // part
    )
    target, words = (ALONE, given.data) if alone else (DEVICES, f"pp:{STAGES} {given.data}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(step, state, *batch, target=target, plan=words, microbatches=count, donate_argnums=0,
                    schedule=None if alone else schedule, gather=None if alone else given.gather,
                    memory_limit_bytes=1e12)  # fmt: skip
    result = compiled(made, target)
    return Row(schedule=schedule, microbatches=count, layers=given.layers, factor=factor_of(schedule, count),
               peak_bytes=result.peak_bytes, data=given.data, gather=given.gather,
               **judged(made, target, result))  # fmt: skip


def factor_of(schedule: str, count: int) -> float:
    """The time of all ticks over that of a stage's work; 1 without a pipeline."""
    if schedule == ALONE_WORD:
        return 1.0
    table = make_schedule(schedule, STAGES, count)
    total, _ = table.ideal(SPLIT_COSTS if WEIGHTS in table.ticks else COSTS)
    return total / (count * (COSTS[FORWARD] + COSTS[BACKWARD]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the steps and print the table."""
    given = _parser().parse_args(arguments)
    if not given.show and (missing := missing_compiler("tpu")):
        print(missing, file=sys.stderr)
        return 1
    stored = json.loads(PATH.read_text()) if PATH.exists() else []
    rows = {row.key: row for row in (Row(**each) for each in stored)}
    for count in [] if given.show else given.microbatches:
        needed = "fsdp" not in given.data and (ALONE_WORD, count, given.layers, given.data, given.gather) not in rows
        for schedule in (*([ALONE_WORD] if needed and ALONE_WORD not in given.schedules else []), *given.schedules):
            row = row_of(given, schedule, count)
            rows[row.key] = row
            print(line(row, [*rows.values()]), flush=True)
            PATH.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n")
    Console(width=160).print(table([*rows.values()]))
    return 0


def over_table(row: Row, rows: Sequence[Row], measure: str) -> float | None:
    """The compiled step over the ideal times the factor of the schedule's table."""
    ideal = next((r for r in rows if r.key[1:] == row.key[1:] and r.schedule == ALONE_WORD), None)
    if ideal is None:
        return None
    here, alone = getattr(row, measure), getattr(ideal, measure)
    return here / (alone * row.factor) if here and alone else None


def line(row: Row, rows: Sequence[Row]) -> str:
    """One line of a row."""
    ratios = [f"{name} {ratio:.3f}" for name in ("cycles", "roofline") if (ratio := over_table(row, rows, name))]
    sizes = ", ".join(scaled_text(size, 1e-9, 2) for size in (row.predicted_bytes, row.peak_bytes))
    times = ", ".join(scaled_text(time, 1e3) for time in (row.predicted, row.cycles, row.roofline))
    return (
        f"{row.schedule} {row.microbatches} {row.data} {row.gather}: {row.kind}, "
        f"peak GB predicted, compiled: {sizes}, ms predicted, cycles, roofline: {times}, "
        f"step / table: {ratios}"
    )


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    found = Table(title="pipelines")
    for name in ("layers", "schedule", "microbatches", "words", "gather", "result", "temporaries MiB",
                 "predicted peak GB", "peak GB", "ms predicted", "ms cycles", "ms roofline", "table", "cycles / table",
                 "roofline / table"):  # fmt: skip
        found.add_column(name)
    for row in sorted(rows, key=lambda row: (row.layers, row.microbatches)):
        temporaries = scaled_text(row.temp_bytes, 2**-20)
        sizes = [scaled_text(size, 1e-9, 2) for size in (row.predicted_bytes, row.peak_bytes)]
        times = [scaled_text(time, 1e3) for time in (row.predicted, row.cycles, row.roofline)]
        ratios = [scaled_text(over_table(row, rows, name), 1.0, 3) for name in ("cycles", "roofline")]
        found.add_row(str(row.layers), row.schedule, str(row.microbatches), row.data, row.gather, row.kind,
                      temporaries, *sizes, *times, f"{row.factor:.3f}", *ratios)  # fmt: skip
    return found


def _schedule(word: str) -> str:
    """Read a word of `--schedules`."""
    return word if word == ALONE_WORD else read_schedule(word)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=[ALONE_WORD, *SCHEDULES], type=_schedule)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--data", default="dp:4", help="the words beside pp:4, such as fsdp:4")
    parser.add_argument("--gather", default="auto", choices=[*WORDS])
    parser.add_argument("--show", action="store_true", help="print the stored rows only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
