"""Programs compiled for a target, a row each, and the file that keeps them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import RESULTS
from estimate import estimate
from estimate_result import Estimate

from autoshard.sharding.audit import CompileJob, build
from autoshard.sharding.audit.aot_compile import Compiled
from autoshard.sharding.audit.compiler_process import versions as compilers

FOLDER = RESULTS / "plans"


@dataclass(frozen=True)
class Row:
    """What the compiler made of a plan, and what the planner says of it. Seconds and bytes of a device and a step.

    Attributes:
        side: who made the plan: `expert`, `today` or `plan` (the planner).
        style: the plan, in its maker's words.
        words: the same in the planner's words.
        remat: policy of the layers.
        microbatches: in how many parts a batch is processed.
        options: compiler options.
        digest: of the exported program, the machine, the options and the compiler's version.
        kind: `ok`, `oom`, or what else became of it.
        message: the compiler's words where it is not ok.
        step: seconds by the estimate, by measure: cycles, roofline.
        exposed: of these waited for, by measure.
        wire_bytes: what leaves a device.
        memory_bytes: arguments, results and temporaries.
        peak_bytes: the compiler's own peak.
        limit_bytes: what there is.
        predicted: the planner's `step`, `wire_bytes` and `memory_bytes` for these words.
        bound: the roofline's seconds, below which no program of this style can be.
        compile_seconds: how long it took.
        cached: whether it was there from an earlier run.
        versions: of the compiler.
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
    wire_bytes: float = 0.0
    memory_bytes: float | None = None
    peak_bytes: float | None = None
    limit_bytes: float = 0.0
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    compile_seconds: float = 0.0
    cached: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a step, by the compiler's cycles where it gives any."""
        return self.step.get("cycles", self.step.get("roofline", float("inf")))

    @property
    def held(self) -> float | None:
        """Bytes that a device holds at most: the compiler's own peak where it says it."""
        return self.peak_bytes or self.memory_bytes

    @property
    def too_large(self) -> bool:
        """Whether a device has too little memory for it: not all compilers refuse such a program."""
        return self.kind == "oom" or bool(self.limit_bytes and (self.peak_bytes or 0.0) > self.limit_bytes)

    @property
    def ok(self) -> bool:
        """Whether it compiled, and fits."""
        return self.kind == "ok" and not self.too_large

    @property
    def name(self) -> str:
        """`zero3:16, full, 2 microbatches`."""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self.style}, {self.remat}{parts}"


@dataclass(frozen=True)
class Planned:
    """A program that is to be compiled: a row without what the compiler says, and how it is exported."""

    side: str
    style: str
    words: str
    remat: str
    microbatches: int
    export: Any = field(repr=False, compare=False)
    predicted: Mapping[str, float] = field(default_factory=dict)
    bound: float = 0.0
    family: tuple[Any, ...] = ()  # what programs share that hold the same activations
    least_bytes: float = 0.0  # what it holds at least


class Store:
    """The rows of a case, kept in a file after each; a row that is there is not compiled again."""

    def __init__(self, case: str, target: str, folder: Path = FOLDER):
        self.case, self.target, self.path = case, target, folder / f"{case}.json"
        self.lock = threading.Lock()
        data = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.rows = [Row(**row) for row in data.get("rows", [])]
        self.pruned: list[dict[str, Any]] = data.get("pruned", [])
        self.notes: dict[str, Any] = data.get("notes", {})

    @classmethod
    def read(cls, path: Path) -> Store:
        """The store of a file."""
        return cls(path.stem, json.loads(path.read_text())["target"], path.parent)

    def finish(self, planned: Planned, options: Mapping[str, str], job: CompileJob) -> Row:
        """The row of an exported program, from the file, the compiler's cache or the compiler."""
        digest = job.digest(json.dumps(compilers(), sort_keys=True))
        known = next((row for row in self.rows if row.digest == digest), None)
        if known is not None:
            row = replace(known, **_said(planned), cached=True)
        else:
            row = self._row(planned, options, digest, build(job))
        with self.lock:
            self.rows = [each for each in self.rows if _key(each) != _key(row)] + [row]
            self.save()
        return row

    def _row(self, planned: Planned, options: Mapping[str, str], digest: str, found: Compiled) -> Row:
        given: dict[str, Any] = _said(planned) | {"options": dict(options), "digest": digest, "kind": found.kind}
        more: dict[str, Any] = {}
        if found.kind == "ok":
            made: Estimate = estimate(found.text, self.target, found.coordinates or None, found.memory)
            more = {"step": made.step, "exposed": made.exposed, "wire_bytes": made.wire_bytes}
            more |= {"memory_bytes": made.memory_bytes, "peak_bytes": made.peak_bytes}
            more["limit_bytes"] = made.memory_limit
        elif found.kind == "oom":
            more = {"memory_bytes": found.needed_bytes, "limit_bytes": found.limit_bytes or 0.0}
        more |= {"compile_seconds": round(found.seconds, 1), "cached": found.cached, "versions": dict(found.versions)}
        return Row(**given, **more, message=found.message[:400])

    def save(self) -> None:
        """Writes the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = sorted(map(asdict, self.rows), key=lambda r: (r["side"], r["style"], r["remat"], r["digest"]))
        made = {"case": self.case, "target": self.target, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
        data = made | {"versions": compilers(), "notes": self.notes, "rows": rows, "pruned": self.pruned}
        self.path.write_text(json.dumps(data, indent=1) + "\n")


def _said(planned: Planned) -> dict[str, Any]:
    names = ("side", "style", "words", "remat", "microbatches", "predicted", "bound")
    return {name: getattr(planned, name) for name in names}


def _key(row: Row) -> tuple[Any, ...]:
    return row.side, row.name, row.options


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest that fits."""
    return min((row for row in rows if row.ok), key=lambda row: row.seconds, default=None)
