"""Programs compiled for a target, one row each, and the file that stores them."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import RESULTS
from estimate import measures
from estimate_result import MEASURES
from judged_steps import estimated

from autoshard.sharding.audit import CompileJob, compile_job
from autoshard.sharding.audit.aot_compile import Compiled, Until
from autoshard.sharding.audit.compiler_process import versions as compilers
from autoshard.sharding.audit.constants import TIMEOUT_S
from autoshard.sharding.machines.targets import TargetError, find_target

FOLDER = RESULTS / "plans"
AT_ONCE = 2  # programs that are compiled at the same time


@dataclass(frozen=True)
class Row:
    """A compiled plan and the planner's prediction of it. Seconds and bytes are of one device and one step.

    Attributes:
        side: who made the plan: `expert`, `today` or `plan` (the planner).
        style: the plan as text: the name of an expert's style, or the planner's strategy.
        words: the plan as a strategy of the planner; empty if the planner has none for it.
        remat: the remat policy of the layers.
        microbatches: the number of microbatches.
        options: the compiler options.
        digest: the hash of the exported program, the machine, the options and the compiler's version.
        kind: the compiler's result: `ok`, `oom` or another failure.
        message: the compiler's message if it failed.
        step: seconds by `estimate.py`, by measure: cycles, roofline, joined. Without machine code, roofline only.
        exposed: the exposed seconds of collectives and copies among these, by measure.
        copies: the exposed seconds of copies among these, by measure; empty in rows of older versions.
        wire_bytes: bytes that a device sends.
        memory_bytes: arguments, results and temporaries.
        peak_bytes: the compiler's peak. For a program with values on the host or without machine code, the size of the
            device's memory space.
        limit_bytes: the memory of a device.
        predicted: the planner's `step`, `wire_bytes` and `memory_bytes` for `words`.
        bound: the roofline's lower bound for programs of this style, in seconds.
        compile_seconds: the duration of the compilation.
        cached: whether an earlier run had compiled it.
        versions: the compiler's versions.
        dropped: options that were left out because this compiler does not know them.
    """

    side: str
    style: str
    words: str
    remat: str
    microbatches: int
    options: Mapping[str, str]
    digest: str
    kind: str
    message: str = ""
    step: Mapping[str, float] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    copies: Mapping[str, float] = field(default_factory=dict)
    wire_bytes: float = 0.0
    memory_bytes: float | None = None
    peak_bytes: float | None = None
    limit_bytes: float = 0.0
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    compile_seconds: float = 0.0
    cached: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    dropped: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step, by the compiler's cycles if there are any, else by the roofline."""
        return self.step.get("cycles", self.step.get("roofline", float("inf")))

    @property
    def needed_bytes(self) -> float | None:
        """The peak memory of a device in bytes, by the compiler if it reports one."""
        known = [size for size in (self.peak_bytes, self.memory_bytes) if size]
        return min(known, default=None)

    @property
    def too_large(self) -> bool:
        """Whether the program exceeds a device's memory. Not all compilers refuse such a program."""
        over = bool(self.limit_bytes and self.peak_bytes and (self.needed_bytes or 0.0) > self.limit_bytes)
        return self.kind == "oom" or over

    @property
    def ok(self) -> bool:
        """Whether the program compiled and fits."""
        return self.kind == "ok" and not self.too_large

    @property
    def name(self) -> str:
        """`zero3:16, full, 2 microbatches`."""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self.style}, {self.remat}{parts}"


@dataclass(frozen=True)
class Planned:
    """A program to compile: a row without the compiler's figures, and a function that exports it."""

    side: str
    style: str
    words: str
    remat: str
    microbatches: int
    export: Any = field(repr=False, compare=False)
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    family: tuple[Any, ...] = ()  # equal for programs with the same activations
    least_bytes: float = 0.0  # a lower bound of its memory


class Store:
    """The rows of a case, stored in a file after each new one.

    A stored row is not compiled again. Two kinds are: one whose compiler was stopped, which may finish on a less busy
    machine or with more time, and one that lacks a measure of the present referee.
    """

    def __init__(
        self,
        case: str,
        target: str,
        folder: Path = FOLDER,
        timeout_s: float = TIMEOUT_S,
        until: Until = "code",
    ):
        """Read the file, if there is one.

        Args:
            case: the name of the file.
            target: the machine.
            folder: the file's folder.
            timeout_s: seconds after which a compiler is stopped.
            until: how far programs are compiled (`compile_job`).
        """
        self.case, self.target, self.path = case, target, folder / f"{case}.json"
        self.until: Until = until
        self.timeout_s, self.at_once = timeout_s, AT_ONCE
        self.lock = threading.Lock()
        data = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.rows = [Row(**row) for row in data.get("rows", [])]
        self.pruned: list[dict[str, Any]] = data.get("pruned", [])
        self.notes: dict[str, Any] = data.get("notes", {})

    @classmethod
    def read(cls, path: Path) -> Store:
        """Read a store from its file."""
        return cls(path.stem, json.loads(path.read_text())["target"], path.parent)

    def begin(self) -> None:
        """Forget the rows of earlier runs: of other versions of the planner, the experts or the referee."""
        self.rows, self.pruned = [], []

    def finish(self, planned: Planned, options: Mapping[str, Any], job: CompileJob) -> Row:
        """Return the row of an exported program, from the file, the compiler's cache or the compiler."""
        digest = job.digest(json.dumps(compilers(), sort_keys=True))
        known = next((row for row in self.rows if row.digest == digest and self._is_final(row)), None)
        if known is not None:
            row = replace(known, **_plan_fields(planned), cached=True)
        else:
            row = self._row(planned, options, digest, compile_job(job, self.timeout_s, until=self.until))
        with self.lock:
            self.rows = [each for each in self.rows if _key(each) != _key(row)] + [row]
            self.save()
        return row

    def _is_final(self, row: Row) -> bool:
        needed = measures(self.target) if self.until == "code" else ("roofline",)
        return row.kind != "timeout" and (row.kind != "ok" or set(row.step) >= set(needed))

    def _row(self, planned: Planned, options: Mapping[str, Any], digest: str, result: Compiled) -> Row:
        job: dict[str, Any] = _plan_fields(planned) | {"options": dict(options), "digest": digest, "kind": result.kind}
        figures: dict[str, Any] = {}
        if result.kind == "ok":
            step = estimated(result, self.target)
            exposed = {name: step.exposed[name] + step.copies[name] for name in step.step}
            figures = {"step": step.step, "exposed": exposed, "copies": step.copies, "wire_bytes": step.wire_bytes}
            figures |= {"memory_bytes": step.memory_bytes, "peak_bytes": step.peak_bytes}
            figures["limit_bytes"] = step.memory_limit
        elif result.kind == "oom":
            figures = {"memory_bytes": result.needed_bytes, "limit_bytes": result.limit_bytes or 0.0}
        figures |= {"compile_seconds": round(result.seconds, 1), "cached": result.cached}
        return Row(**job, **figures, versions=dict(result.versions), message=result.message[:400],
                   dropped=list(result.dropped))  # fmt: skip

    def save(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = sorted(map(asdict, self.rows), key=lambda r: (r["side"], r["style"], r["remat"], r["digest"]))
        head = {"case": self.case, "target": self.target, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
        head |= {"measures": measures_of(self.rows)}
        data = head | {"versions": compilers(), "notes": self.notes, "rows": rows, "pruned": self.pruned}
        self.path.write_text(json.dumps(data, indent=1) + "\n")


def _plan_fields(planned: Planned) -> dict[str, Any]:
    names = ("side", "style", "words", "remat", "microbatches", "predicted", "bound")
    return {name: getattr(planned, name) for name in names}


def _key(row: Row) -> tuple[Any, ...]:
    return row.side, row.name, row.options


def measures_of(rows: Sequence[Row]) -> list[str]:
    """Return the measures that all compiled rows have, cycles first if they have them."""
    steps = [row.step for row in rows if row.kind == "ok"]
    return [name for name in MEASURES if steps and all(name in step for step in steps)]


def best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row that fits, by the first measure that all of them have."""
    fitting = [row for row in rows if row.ok]
    measure = next(iter(measures_of(fitting)), "")
    return min(fitting, key=lambda row: row.step.get(measure, float("inf")), default=None)


def prediction(made: Any) -> dict[str, float]:
    """Return the step time in seconds and the peak memory in bytes that a plan predicts."""
    return {"step": made.estimate.step_time_us / 1e6, "memory_bytes": made.estimate.peak_memory_bytes}


def run_on_chips(
    arguments: Sequence[str],
    description: str | None,
    stored: Path,
    chips: int,
    compile_rows: Callable[[Store], None],
    show: Callable[[Store], None],
) -> None:
    """Run the command line of a benchmark with one file of rows: compile and store the rows, then print them.

    Args:
        arguments: `--target`, `--timeout` and `--show`.
        description: what the benchmark does, for `--help`.
        stored: the file of the rows.
        chips: the number of TPU chips for which its programs are planned.
        compile_rows: compiles and stores the rows.
        show: prints stored rows.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x4", help=f"{chips} chips of a TPU; default: v5e:2x4")
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds after which a compiler is stopped")
    parser.add_argument("--show", action="store_true", help="print the stored rows without compiling")
    given = parser.parse_args(arguments)
    try:
        machine = find_target(given.target)
    except TargetError as error:
        parser.error(f"--target: {error}")
    if (machine.platform, machine.devices) != ("tpu", chips):
        parser.error(f"--target {given.target}: the programs are planned for {chips} chips of a TPU, such as v5e:2x4")
    store = Store.read(stored) if given.show else Store(stored.stem, given.target, stored.parent, given.timeout)
    if not given.show:
        compile_rows(store)
    show(store)


def add_schedule_option(parser: argparse._ActionsContainer) -> None:
    """Add `--schedule` to a command line, or to a group of its options."""
    parser.add_argument("--schedule", action="store_true", help="generate no machine code; judge by the roofline")


def requested_until(given: argparse.Namespace) -> Until:
    """Return how far a command line with `--schedule` compiles programs."""
    return "schedule" if given.schedule else "code"


def run_cases(
    arguments: Sequence[str],
    description: str | None,
    targets: Mapping[str, str],
    folder: Path,
    compile_rows: Callable[[Store], Any],
    show: Callable[[Sequence[Store]], int],
    schedule: bool = False,
) -> int:
    """Run a benchmark's command line: compile and store the rows of some cases, then print them.

    Args:
        arguments: the names of cases, `--timeout`, `--show` and perhaps `--schedule`.
        description: what the benchmark does, for `--help`.
        targets: the name of each case -> its target.
        folder: the folder of the stored rows.
        compile_rows: compiles and stores the rows of a case.
        show: prints stored rows; returns the exit code.
        schedule: whether there is an option `--schedule`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"cases: {', '.join(targets)}; default: all")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds after which a compiler is stopped")
    parser.add_argument("--show", action="store_true", help="print the stored rows only")
    if schedule:
        add_schedule_option(parser)
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.cases if name not in targets]:
        parser.error(f"unknown case {unknown[0]!r}; choose from {', '.join(targets)}")
    names = given.cases or list(targets)
    if not given.show:
        for name in names:
            until = requested_until(given) if schedule else "code"
            compile_rows(Store(name, targets[name], folder, given.timeout, until))
    return show([Store(name, targets[name], folder) for name in names if (folder / f"{name}.json").exists()])
