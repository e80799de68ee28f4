"""Long sequences as compiled: whether they fit, what falls with the devices of a sequence, and what is gathered.

    python benchmarks/long_sequences.py [CASE ...] [--words WORDS ...] [--show]

Published models are planned with given words and compiled for their machine, all layers included. Nothing runs. The
cases `memory` shard the sequence over 2, 4 and 8 devices: one sequence for each group, and the same shards of the
state, so that only what a sequence needs changes. `gathers` counts the all-gathers of floats that hold a whole
sequence: a dimension that the sequence divides, or neighbouring dimensions whose product it is. Arrays with the
shape of a parameter are left out. Results are stored in `results/long_sequences.json`, one row for each case and plan.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import jax
from common import RESULTS, Console, Table
from hlo import Array, Module, bits_of, read
from hlo_collectives import events
from judged_steps import JudgedStep, compiled, judged, scaled_text

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.models.workloads import workload
from autoshard.sharding.audit import missing_compiler
from autoshard.sharding.machines.targets import find_target
from autoshard.train.program.build import workload_step

PATH = RESULTS / "long_sequences.json"


@dataclass(frozen=True)
class Case:
    """A model, its machine, and the plans to compile: words -> rows of the batch."""

    model: str
    target: str
    sequence: int
    plans: Mapping[str, int]


CASES: Mapping[str, Case] = {
    "llama-7b-128k": Case(
        "llama-7b", "v5p:4x4x4", 131072, {"fsdp:2 ulysses:32": 2, "fsdp:2 ring:32": 2, "fsdp:2 ring:4 ulysses:8": 2}
    ),
    "llama-7b-32k": Case("llama-7b", "v5e:16x16", 32768, {"fsdp:32 ulysses:8": 32, "fsdp:32 ring:8": 32}),
    "llama-70b-128k": Case("llama2-70b", "tpu7x:4x8x8", 131072, {"fsdp:64 ulysses:8": 64, "fsdp:64 ring:8": 64}),
    "memory": Case(
        "llama-7b",
        "v5p:4x4x4",
        32768,
        {
            f"{data} {way}:{count}".strip(): 64 // count
            for way in ("ring", "ulysses", "gather")
            for data, count in (("dp:4 fsdp:8", 2), ("dp:2 fsdp:8", 4), ("fsdp:8", 8))
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row(JudgedStep):
    """A compiled step. Bytes are of one device.

    Attributes:
        case, words, batch: what was planned.
        argument_bytes: the step's inputs: state and batch.
        peak_bytes: the compiler's own peak.
        limit_bytes: the memory of a device.
        gathers: the shapes of the all-gathers of floats that hold a whole sequence.
        message: the compiler's message if it failed.
    """

    case: str
    words: str
    batch: int
    argument_bytes: float | None
    peak_bytes: float | None
    limit_bytes: float
    gathers: Sequence[str]
    message: str

    @property
    def fits(self) -> bool:
        """Whether the program compiled and fits."""
        return self.kind == "ok" and (self.peak_bytes or math.inf) <= self.limit_bytes


def row_of(name: str, words: str) -> Row:
    """Plan, compile and judge one step under full rematerialization."""
    case = CASES[name]
    batch = case.plans[words]
    work = workload(case.model).with_(context=case.sequence, batch_size=batch, remat="full")
    step, state, rows = workload_step(work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(step, state, rows, target=case.target, plan=words, donate_argnums=0)
    result = compiled(made, case.target)
    gathers: list[str] = []
    if result.kind == "ok":
        shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
        gathers = sorted({str(shape) for shape in whole_sequences(read(result.text), case.sequence, shapes)})
    return Row(case=name, words=words, batch=batch, gathers=gathers, message=result.message[:400],
               argument_bytes=result.memory.get("argument"), peak_bytes=result.peak_bytes,
               limit_bytes=find_target(case.target).chip.memory_bytes,
               **judged(made, case.target, result))  # fmt: skip


def whole_sequences(module: Module, length: int, parameters: Sequence[Sequence[int]] = ()) -> Iterator[str]:
    """Yield the results of all-gathers of floats that hold a whole sequence.

    Args:
        module: the compiled program.
        length: positions of a sequence.
        parameters: the shapes of parameters, which are no sequences. A layer of a stack counts, too.
    """
    known = {_sizes(shape[first:]) for shape in parameters for first in (0, 1)}
    for where in module.computations.values():
        for one in where.instructions:
            started = [event.collective for event in events(module, where, one) if event.role in ("sync", "start")]
            if not any(each and each.kind == "all-gather" for each in started):
                continue
            shards = {leaf.dims for operand in where.inputs(one) for leaf in operand.leaves}  # in a start's tuple, too
            for leaf in one.leaves:
                if (
                    leaf.dims not in shards
                    and _float(leaf)
                    and _sizes(leaf.dims) not in known
                    and holds(leaf.dims, length)
                ):
                    yield f"{leaf.dtype}{list(leaf.dims)}"


def holds(dims: Sequence[int], length: int) -> bool:
    """Whether a shape has a dimension that `length` divides, or neighbouring dimensions whose product is `length`.

    >>> holds((1, 32768, 8), 32768), holds((2, 16384, 8), 32768), holds((1, 4096, 8), 32768)
    (True, True, True)
    """
    runs = (math.prod(dims[i:j]) for i in range(len(dims)) for j in range(i + 2, len(dims) + 1))
    return any(size and size % length == 0 for size in dims) or length in runs


def _float(leaf: Array) -> bool:
    return leaf.dtype.startswith(("f", "bf")) and bits_of(leaf.dtype) >= 8


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def line(row: Row) -> str:
    """One line of a row."""
    peak = scaled_text(row.peak_bytes, 2**-30)
    verdict = "fits" if row.fits else "does not fit" if row.kind in ("ok", "oom") else row.kind
    return f"{row.case}, {row.words}: {verdict}, peak {peak} GiB, whole sequences gathered: {len(row.gathers)}"


def table(rows: Sequence[Row]) -> Table:
    """All rows."""
    found = Table(title="long sequences")
    for name in ("case", "plan", "batch", "fits", "arguments GiB", "temporaries GiB", "peak GiB", "predicted GiB",
                 "limit GiB", "s cycles", "s roofline", "s predicted", "gathers"):  # fmt: skip
        found.add_column(name)
    for row in rows:
        sizes = (row.argument_bytes, row.temp_bytes, row.peak_bytes, row.predicted_bytes, row.limit_bytes)
        times = (row.cycles, row.roofline, row.predicted)
        found.add_row(row.case, row.words, str(row.batch), "yes" if row.fits else "no",
                      *(scaled_text(size, 2**-30, 2) for size in sizes),
                      *(scaled_text(time, 1.0, 2) for time in times), str(len(row.gathers)))  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--words", nargs="+", help="only these plans of the cases")
    parser.add_argument("--show", action="store_true", help="print the stored rows only")
    given = parser.parse_args(arguments)
    stored = json.loads(PATH.read_text()) if PATH.exists() else []
    rows = {(row.case, row.words): row for row in (Row(**each) for each in stored)}
    if not given.show and (missing := missing_compiler("tpu")):
        print(missing, file=sys.stderr)
        return 1
    for name in [] if given.show else given.cases or list(CASES):
        for words in CASES[name].plans:
            if given.words is None or words in given.words:
                rows[name, words] = row_of(name, words)
                print(line(rows[name, words]), flush=True)
                PATH.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n")
    Console(width=180).print(table(list(rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
