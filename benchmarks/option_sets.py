"""What each set of XLA options does to one small program, by chip.

    python benchmarks/option_sets.py                      # all chips whose compiler is installed
    python benchmarks/option_sets.py v6e:2x4 --each       # one machine, and each option alone
    python benchmarks/option_sets.py --show               # the stored rows, without compiling

The program is the train step of a scanned GPT (4 layers of width 1024) under `fsdp`, for the host set with the residual
stream in host memory. It is compiled under the chip's default options and then with each set of the table in
`autoshard.sharding.machines.options`, sets that are used only on request included. A row says whether the compiler
refuses options, whether the compiled program is another one, and the step time by the audit over that of the default
options. Nothing runs. Rows are stored in `results/option_sets.json` one by one, and compiled programs in the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import RESULTS, Console, Table

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.models.workloads import workload
from autoshard.sharding.audit import Audit, missing_compiler, verify_under
from autoshard.sharding.machines.options import (
    SETS,
    Options,
    OptionSet,
    ProgramFacts,
    default_options,
    set_names,
    with_needed,
    with_set,
)
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step

PATH = RESULTS / "option_sets.json"
TARGETS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8")
PROGRAM: Mapping[str, Any] = {
    "layers": 4, "width": 1024, "heads": 8, "vocab": 2048, "context": 512, "batch_size": 64, "attention": "plain",
}  # fmt: skip
HOST_SET = "host-transfers"
DEFAULT = "default"


@dataclass(frozen=True)
class Row:
    """A program compiled under one set, or under one option of it. Times are microseconds of a step, by the audit.

    Attributes:
        target: the machine.
        name: the set; `default` for the default options; `set: option` for one option of a set.
        remat: the remat policy of the program.
        kind: the compiler's result: `ok`, `error`, ...
        us: the step time; None if there is none.
        base_us: the same under the default options.
        compute_us, exposed_us, host_us: the parts of `us`: compute, exposed collectives, exposed host transfers.
        changes: whether the compiled program differs from that under the default options.
        refused: the options that the compiler does not know.
        message: the compiler's message if it failed.
        requested: why the set is used only on request; empty for the others.
        versions: the compiler's versions.
    """

    target: str
    name: str
    remat: str
    kind: str
    us: float | None
    base_us: float | None
    compute_us: float | None
    exposed_us: float | None
    host_us: float | None
    changes: bool
    refused: Sequence[str]
    message: str
    requested: str
    versions: Mapping[str, str]

    @property
    def outcome(self) -> str:
        """`0.93`, `changes nothing`, or why there is no time."""
        if self.kind != "ok" or self.us is None or self.base_us is None:
            return f"{self.kind}: {self.message[:60]}"
        return f"{self.us / self.base_us:.3f}" if self.changes or self.name == DEFAULT else "changes nothing"


class Case:
    """A planned program for one machine, and its audit under the default options."""

    def __init__(self, target: str, remat: str):
        """Plan the program. Nothing is compiled before `base` is read."""
        self.target, self.remat = target, remat
        work = workload("gpt-1.3b").with_(**PROGRAM, remat=remat)
        devices = find_target(target).devices
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoshardWarning)
            made = plan(*workload_step(work), target=target, plan=f"fsdp:{devices}", donate_argnums=0)
        self.executable = bound_or_error(made.bound).executable
        facts = program_facts(made)
        assert facts is not None, f"{target} has no option sets"
        self.facts: ProgramFacts = facts
        self._base: Audit | None = None

    @property
    def base(self) -> Audit:
        """The audit under the default options."""
        if self._base is None:
            self._base = verify_under(self.executable, default_options(self.facts.chip))
        return self._base

    def row(self, name: str, options: Options, requested: str = "") -> Row:
        """Compile the program under these options."""
        base = self.base
        audit = base if name == DEFAULT else verify_under(self.executable, options)
        return Row(
            self.target, name, self.remat, audit.kind, audit.step_time_us, base.step_time_us, audit.compute_us,
            audit.exposed_us, audit.host_exposed_us, audit.program != base.program, audit.dropped, audit.message,
            requested, dict(audit.versions),
        )  # fmt: skip


def rows_of(target: str, *, each: bool) -> Iterator[Row]:
    """Compile the program of a machine under each of its sets, and each option alone if asked to."""
    cases = {"full": Case(target, "full"), "host:residual": Case(target, "host:residual")}
    chip = cases["full"].facts.chip
    yield cases["full"].row(DEFAULT, default_options(chip))
    for name in set_names(chip):
        chosen = SETS[name]
        case = cases["host:residual" if name == HOST_SET else "full"]
        for label, options in _variations(case, chosen, each):
            yield case.row(label, options, chosen.numerics.get(chip, ""))


def _variations(case: Case, chosen: OptionSet, each: bool) -> Iterator[tuple[str, Options]]:
    """The default options with a set, or without it if it is one of them; then with single options of it."""
    chip, base = case.facts.chip, default_options(case.facts.chip)
    own = with_set({}, chosen, case.facts)
    if chip in chosen.default:
        yield f"without {chosen.name}", {name: value for name, value in base.items() if name not in own}
        return
    merged = with_set(base, chosen, case.facts)
    yield chosen.name, merged
    if each and len(own) > 1:
        for option in own:
            rest = {name: value for name, value in merged.items() if name not in own or name == option}
            yield f"{chosen.name}: {option}", with_needed(rest)[0]


def stored(path: Path = PATH) -> list[Row]:
    """Read the stored rows."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def save(rows: Sequence[Row], path: Path = PATH) -> None:
    """Write the rows."""
    head = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "program": dict(PROGRAM)}
    path.write_text(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def merged(rows: Sequence[Row], new: Row) -> list[Row]:
    """Replace the row of the same machine and set, or append it."""
    kept = [row for row in rows if (row.target, row.name) != (new.target, new.name)]
    return sorted([*kept, new], key=lambda row: TARGETS.index(row.target) if row.target in TARGETS else len(TARGETS))


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(
        "target", "set", "step over default", "step ms", "compute", "exposed", "host", "refused", "on request"
    )
    for row in rows:
        times = [f"{us / 1e3:.2f}" if us is not None else "-"
                 for us in (row.us, row.compute_us, row.exposed_us, row.host_us)]  # fmt: skip
        table.add_row(row.target, row.name, row.outcome, *times, ", ".join(row.refused), row.requested)
    Console(width=180).print(table)


def main(arguments: Sequence[str]) -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"machines; default: {' '.join(TARGETS)}")
    parser.add_argument("--each", action="store_true", help="also compile with each option of a set alone")
    parser.add_argument("--show", action="store_true", help="print the stored rows and compile nothing")
    given = parser.parse_args(arguments)
    rows = stored()
    for target in [] if given.show else given.targets or TARGETS:
        if missing := missing_compiler(find_target(target).platform):
            print(f"{target}: {missing}", file=sys.stderr)
            continue
        for row in rows_of(target, each=given.each):
            rows = merged(rows, row)
            save(rows)
            print(f"{row.target} {row.name}: {row.outcome}", flush=True)
    show(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
