"""Compare the predicted peak memory with that of compiled programs, and show what both consist of.

    python benchmarks/peak_memory.py                              every row
    python benchmarks/peak_memory.py plain-gpt v5e --buffers      rows whose name contains all words, with the buffers
    python benchmarks/peak_memory.py --show                       the stored rows

Compiled rows are stored one by one in `results/peak_memory.json`, each in place of the earlier one of its name.

Each row is a program (one of `plain_models.py`, such as `plain-gpt`, or `plain-gpt-8` with 8 rows; or a workload with
few layers), a remat policy, a plan and a target. No device is needed. The columns are GiB of one device:

    predicted   the plan's estimate
    compiled    on a TPU, the size of the device's memory space, gaps between buffers included. By this size XLA decides
                whether a program fits. It is known before there is machine code, so a row takes seconds. On a GPU, the
                compiler's own peak
    upper       on a GPU, arguments + temporaries + results outside of donated memory. Not all temporaries are alive at
                once

`--buffers` also prints the temporaries at the peak, by the estimate and by the compiler.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import RESULTS  # sets up the path and the devices first
from plain_models import PLAIN

from autoshard import plan
from autoshard._compat import source_line
from autoshard.models.workloads import workload
from autoshard.sharding.audit import compile_job
from autoshard.sharding.audit.compiler_process import versions
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step

FILE = RESULTS / "peak_memory.json"
GiB = 2**30
SHOWN = 12
# A workload with few layers: name -> (workload, batch size, changes of its config).
OURS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama3-8b": ("llama3-8b", 16, {"layers": 4, "context": 2048}),
    "llama3-8b-small": ("llama3-8b", 8, {"layers": 4, "context": 2048}),
    "gpt-1.3b": ("gpt-1.3b", 64, {"layers": 4}),
    "moe-2.4b": ("moe-2.4b", 32, {"layers": 4}),
    "vit-l16": ("vit-l16", 256, {"layers": 4}),
    "llama2-70b": ("llama2-70b", 32, {"layers": 8, "context": 4096, "attention": "auto"}),
    "gpt3-175b": ("gpt3-175b", 48, {"layers": 4, "attention": "auto"}),
}
FSDP, ZERO1, TP, SEQ = "fsdp:8", "zero1:8", "dp:4 tp:2", "tp:8 seq"
# (program, remat, plan, targets)
CASES: Sequence[tuple[str, str, str, Sequence[str]]] = (
    ("plain-llama", "none", FSDP, ("v5e:2x4", "h100:1x8")),
    ("plain-llama", "full", FSDP, ("v6e:2x4", "h100:1x8")),
    ("plain-llama", "dots", TP, ("v6e:2x4",)),
    ("plain-gpt", "none", FSDP, ("v5e:2x4", "h100:1x8")),
    ("plain-gpt-8", "none", ZERO1, ("v5e:2x4",)),
    ("plain-gpt", "full", FSDP, ("v6e:2x4",)),
    ("plain-gpt", "dots", SEQ, ("v5e:2x4",)),
    ("plain-vit", "none", FSDP, ("v5e:2x4", "h100:1x8")),
    ("plain-vit", "full", TP, ("v5e:2x4",)),
    ("plain-moe", "none", FSDP, ("v5e:2x4", "h100:1x8")),
    ("plain-residual", "none", FSDP, ("v5e:2x4", "h100:1x8")),
    ("plain-residual", "full", FSDP, ("v6e:2x4",)),
    *(
        (f"plain-{name}", remat, "dp:4", ("v5e:2x2",))
        for remat, names in (("none", ("gelu", "silu", "swiglu", "erf")), ("full", ("gelu", "swiglu", "erf")))
        for name in names
    ),
    ("llama3-8b", "full", FSDP, ("v6e:2x4", "v5p:2x2x2", "h100:1x8")),
    ("llama3-8b-small", "full", FSDP, ("v5e:2x4",)),
    ("gpt-1.3b", "dots", FSDP, ("v5e:2x4", "h100:1x8")),
    ("gpt-1.3b", "keep:qkv+context+mlp_in", FSDP, ("v5e:2x4",)),
    ("gpt-1.3b", "none", SEQ, ("v5e:2x4",)),
    ("moe-2.4b", "dots", FSDP, ("v5e:2x4",)),
    ("vit-l16", "none", FSDP, ("v5e:2x4", "h100:1x8")),
    ("llama2-70b", "host:qkv", "fsdp:16", ("v6e:4x4",)),
    ("llama2-70b", "host:mlp_in keep:context", "fsdp:16", ("v6e:4x4",)),
    ("gpt3-175b", "full", "fsdp:16", ("v6e:4x4",)),
    ("gpt3-175b", "host:qkv+mlp_in", "fsdp:16", ("v6e:4x4",)),
)


@dataclass(frozen=True)
class Row:
    """A program compiled for a target: bytes of one device.

    Attributes:
        program: its name.
        remat: its remat policy.
        words: its plan.
        target: the machine.
        kind: `ok`, or why there is no compiled peak.
        predicted: the estimate by kind.
        compiled: the compiler's figures by kind.
        peak: the compiled peak; 0 if there is none.
    """

    program: str
    remat: str
    words: str
    target: str
    kind: str
    predicted: dict[str, float]
    compiled: dict[str, float]
    peak: float

    @property
    def name(self) -> str:
        """`plain-gpt full fsdp:8 v5e:2x4`."""
        return f"{self.program} {self.remat} {self.words} {self.target}"

    @property
    def total(self) -> float:
        """The predicted peak."""
        return sum(self.predicted.values())

    @property
    def upper(self) -> float:
        """The compiler's arguments, temporaries and results outside of donated memory; 0 if it does not give them."""
        kinds = self.compiled
        return kinds["argument"] + kinds["temp"] + kinds["output"] - kinds["alias"] if "argument" in kinds else 0.0

    def text(self) -> str:
        """The row as a line of the table."""
        held = self.total - self.predicted["temporary"]
        sizes = (self.total, self.peak, self.upper, held, self.predicted["temporary"], self.compiled.get("temp", 0.0))
        ratio = f"{self.total / self.peak:5.2f}" if self.peak else "    -"
        columns = "".join(f"{size / GiB:10.2f}" if size else f"{'-':>10s}" for size in sizes)
        return f"{self.name:46s}{columns}  {ratio}  {self.kind}"


HEAD = (
    f"{'':46s}"
    + "".join(f"{c:>10s}" for c in ("predicted", "compiled", "upper", "held", "temp", "temp c."))
    + "  ratio"
)


def made(program: str, remat: str) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """Return a program's step, the shapes of its state and those of its batch."""
    if program.startswith("plain-"):
        name, *rows = program.removeprefix("plain-").split("-")
        return PLAIN[name](remat, *map(int, rows))
    name, rows, changes = OURS[program]
    step, state, batch = workload_step(workload(name).with_(batch_size=rows, remat=remat, **changes))
    return step, state, (batch,)


def measured(program: str, remat: str, words: str, target: str, buffers: bool, compiles: bool = True) -> Row:
    """Plan and compile one row. With `buffers`, print the buffers at both peaks."""
    step, state, batch = made(program, remat)
    planned = plan(step, state, *batch, target=target, plan=words, donate_argnums=0)
    head: dict[str, Any] = {"program": program, "remat": remat, "words": words, "target": target}
    head["predicted"] = dict(planned.estimate.memory_bytes)
    if buffers:
        print("estimate's temporaries at the peak:\n" + _estimated(planned))
    if not compiles:
        return Row(**head, kind="", compiled={}, peak=0.0)
    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(scratch) / "dump" if buffers else None  # a cached program is not dumped
        job = export_plan(bound_or_error(planned.bound).executable)
        found = compile_job(job, cache=Path(scratch) if buffers else None, dump=dump, until="schedule")
        if dump is not None:
            print("compiler's buffers at the peak:\n" + _compiled(dump))
    kinds = ("argument", "temp", "output", "alias", "peak", "device")
    compiled = {kind: float(found.memory[kind]) for kind in kinds if kind in found.memory}
    return Row(**head, kind=found.kind, compiled=compiled, peak=float(found.peak_bytes or 0.0))


def _estimated(planned: Any) -> str:
    bound = bound_or_error(planned.bound)
    return "\n".join(f"{size / 2**20:10.1f} MiB  {what}" for size, what in _at_peak(bound)[:SHOWN])


def _at_peak(bound: Any) -> list[tuple[float, str]]:
    problem, layout = bound.problem, bound.layout
    program = problem.axes.program
    buffers = problem.cost(layout).live_buffers
    maker = {v: op for op in program.ops() for v in op.results}
    found = []
    for v, size in problem.memory.at_peak(layout, buffers):
        op = maker.get(v)
        found.append((size, f"{program.avals[v].str_short()} {_maker(op)}"))
    return found


def _maker(op: Any) -> str:
    return f"{op.name} {source_line(op.eqn)}" if op else "input"


def _compiled(folder: Path) -> str:
    """The buffers at the peak, from the compiler's dump of live ranges."""
    files = sorted(folder.glob("**/*live-range.txt"), key=lambda f: f.stat().st_size)
    if not files:
        return "  (the compiler wrote none)"
    text = files[-1].read_text()
    shapes = dict(re.findall(r"%?([\w.-]+) = (\(?[a-z0-9]+\[[\d,]*\])", "".join(
        f.read_text() for f in folder.glob("**/*after_optimizations.txt"))))  # fmt: skip
    peak = text.split("(peak):")[-1].split("Stack trace")[0]
    lines = re.findall(r"([\w.-]+)\{[\d,]*\}: (\d+) bytes", peak)[: 2 * SHOWN]
    return "\n".join(f"{int(size) / 2**20:10.1f} MiB  {shapes.get(name, '')} {name}" for name, size in lines)


def cases() -> dict[str, tuple[str, str, str, str]]:
    """Return the rows' program, remat policy, plan and target by their names."""
    rows = [(program, remat, words, target) for program, remat, words, targets in CASES for target in targets]
    return {" ".join(row): row for row in rows}


def stored(file: Path = FILE) -> list[Row]:
    """Return the stored rows."""
    return [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []


def store(row: Row, file: Path = FILE) -> None:
    """Store a row in place of the earlier one of its name, unless the compiler was stopped or failed.

    Rows that are no case any more are left out.
    """
    if row.kind not in ("ok", "oom"):
        return
    rows = {each.name: each for each in (*stored(file), row)}
    kept = [asdict(rows[name]) for name in cases() if name in rows]
    body = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions(), "rows": kept}
    file.write_text(json.dumps(body, indent=1) + "\n")


def main() -> None:
    """Compile, store and print rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only rows whose name contains all of these")
    parser.add_argument("--buffers", action="store_true", help="show the buffers at the peak")
    parser.add_argument("--predict", action="store_true", help="compile nothing")
    parser.add_argument("--show", action="store_true", help="print the stored rows only")
    options = parser.parse_args()
    print(HEAD)
    if options.show:
        print(*(row.text() for row in stored()), sep="\n")
        return
    for name, case in cases().items():
        if all(word in name for word in options.words):
            row = measured(*case, options.buffers, not options.predict)
            print(row.text(), flush=True)
            if not options.predict:
                store(row)


if __name__ == "__main__":
    main()
