"""Measure the time of planning the programs of the corpus, beside that of tracing and lowering them.

    python benchmarks/corpus_planning.py [NAME ...]      each program on its first machine, one process each
    python benchmarks/corpus_planning.py --profile NAME  where the time of one program goes, by room of the package

Everything is planned from shapes. Times are CPU seconds of all threads. A program is traced and lowered for one device
first. Planning then traces it again and profits from JAX's caches, as it does in use. The figure is
planning / (tracing + lowering), once with kernels in the place of attention, as in `bench_formulations.py`, and once
without.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import common  # sets up the path and the devices first
import jax
from formulations.corpus import CORPUS
from formulations.formulation import Program
from rich.console import Console
from rich.table import Table

import autoshard

RESULT = common.RESULTS / "corpus_planning.json"
# Both chosen, not measured.
BARS = {"median": 3.0, "worst": 8.0}  # largest planning / (tracing + lowering)
SHOWN_ROOMS = 12  # rows of a profile
PACKAGE = Path(autoshard.__file__).parent


def measure(name: str) -> dict[str, float | str]:
    """Return the CPU seconds of tracing, lowering and planning a program."""
    target, program = _first_program(name)
    state, batch = program.shapes()
    _import_all(target)
    times = [time.process_time()]
    traced = jax.jit(program.step, donate_argnums=0).trace(state, *batch)
    times.append(time.process_time())
    traced.lower()
    times.append(time.process_time())
    for kernels in ("off", "auto"):
        _, fresh = _first_program(name)  # a new function, whose plan is not cached
        autoshard.plan(fresh.step, state, *batch, target=target, donate_argnums=0, kernels=kernels)
        times.append(time.process_time())
    trace_s, lower_s, plan_s, kernels_s = (b - a for a, b in zip(times, times[1:], strict=False))
    row = {"trace_s": trace_s, "lower_s": lower_s, "plan_s": plan_s, "with_kernels_s": kernels_s}
    ratios = {"ratio": plan_s / (trace_s + lower_s), "with_kernels": kernels_s / (trace_s + lower_s)}
    return {"name": name, "target": target} | {k: round(v, 2) for k, v in (row | ratios).items()}


def _first_program(name: str) -> tuple[str, Program]:
    """Return the first machine of a program of the corpus, and the program for it."""
    target = next(iter(CORPUS[name].targets))
    return target, CORPUS[name].program(target)


def _import_all(target: str) -> None:
    """Plan and lower a small program, so that no imports are measured."""
    x, w = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")
    step = jax.grad(lambda w, x: (x @ w).sum())
    jax.jit(step).trace(w, x).lower()
    autoshard.plan(step, w, x, target=target, kernels="auto")


def profile(name: str) -> Table:
    """Tabulate the seconds that planning a program spends in each room of the package.

    A room's seconds include its direct calls of other packages.
    """
    target, program = _first_program(name)
    state, batch = program.shapes()
    _import_all(target)
    profiler = cProfile.Profile()
    profiler.enable()
    autoshard.plan(program.step, state, *batch, target=target, donate_argnums=0, kernels="auto")
    profiler.disable()
    table = Table(title=f"{name} on {target}: seconds under a profiler, which takes time itself")
    table.add_column("room")
    table.add_column("seconds", justify="right")
    for room, seconds in _by_room(pstats.Stats(profiler)).most_common(SHOWN_ROOMS):
        table.add_row(room, f"{seconds:.2f}")
    return table


def _by_room(stats: pstats.Stats) -> Counter[str]:
    """Sum the time of functions, without their callees, by room.

    Functions of other packages count for the rooms that call them directly.
    """
    found: Counter[str] = Counter()
    for (file, _, _), (_, _, own, _, callers) in stats.stats.items():  # pyright: ignore[reportAttributeAccessIssue]
        if room := _room(file):
            found[room] += own
            continue
        known = {room: times[2] for (caller, _, _), times in callers.items() if (room := _room(caller))}
        found["other packages"] += own - sum(known.values())
        for room, seconds in known.items():
            found[room] += seconds
    return found


def _room(file: str) -> str:
    path = Path(file)
    return str(path.parent.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


def show(rows: Sequence[dict[str, float | str]]) -> dict[str, float]:
    """Print the rows and return the figures: median and worst ratio."""
    table = Table(title="CPU seconds")
    columns = list(rows[0])
    for column in columns:
        table.add_column(column)
    for row in sorted(rows, key=lambda row: float(row["ratio"])):
        table.add_row(*(str(row[column]) for column in columns))
    figures: dict[str, float] = {}
    for key in ("ratio", "with_kernels"):
        ratios = [float(row[key]) for row in rows]
        figures |= {f"{key}_median": round(median(ratios), 2), f"{key}_worst": max(ratios)}
    Console(width=150).print(table, figures, f"bars: {BARS}")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the requested programs. Rows are stored only if all programs are measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; default: all")
    parser.add_argument("--profile", action="store_true", help="print where the time of each program goes")
    parser.add_argument("--one", action="store_true", help="measure one program in this process and print its row")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in CORPUS]:
        parser.error(f"unknown program {unknown[0]!r}; choose from {', '.join(CORPUS)}")
    names = given.names or list(CORPUS)
    if given.profile:
        Console(width=100).print(*map(profile, names))
        return 0
    if given.one:
        print(json.dumps(measure(names[0])))
        return 0
    rows = []
    for name in names:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    figures = show(rows)
    if not given.names:
        RESULT.write_text(
            json.dumps({"benchmark": "corpus_planning", "bars": BARS, **figures, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
