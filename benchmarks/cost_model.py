"""Compare the planner's estimates with the compiled programs.

    python benchmarks/cost_model.py [CASE ...]

The rows are all programs that `bench_plans.py` compiled and whose plan can be written as a strategy of the planner;
this includes plans of experts. The tables show predicted / compiled for the step (by the compiler's cycles, where a
program has machine code, and by a roofline of the compiled program), the peak memory and the bytes sent, with the
median error of each. Kendall's tau
compares the order of step times over three sets:

    rows    all rows. The estimate does not depend on compiler options, so it cannot rank rows that differ only in them
    plans   one row for each plan and variant, with the compiler options that are fastest for it
    kept    the plans that the compiler followed: bytes sent are within 10 % of the plan's

`pairs` compares plans of different kinds (`strategy_kinds`) for one program, two at a time: how far the ratio of their
estimated steps is from the ratio of the compiled ones. `memory` is compiled / estimated memory - 1.
`search/constants.py` contains the percentiles of both.

The estimate does not include unplanned traffic that the compiler adds. Some compilers accept programs that do not fit
(XLA:GPU then recomputes much of them). Such programs are among the rows; those that fit have a line of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import combinations
from math import log
from statistics import median, quantiles

from plan_rows import FOLDER, Row, Store
from rich.console import Console
from rich.table import Table

from autoshard.sharding.search.strategy_kinds import kind_of

# Both chosen, not measured.
MOST_UNPLANNED_SHARE = 0.10  # a program is as planned if its bytes sent differ by at most this fraction
LEAST_RANKED_RATIO = 1.03  # pairs of plans whose times differ by less are not ranked


def comparable(store: Store) -> list[Row]:
    """Return the rows that compiled and have an estimate."""
    return [row for row in store.rows if row.kind == "ok" and row.predicted.get("memory_bytes")]


def predicted(stores: Sequence[Store]) -> Table:
    """Tabulate the errors of the planner's estimates by case: median absolute error, smallest and largest error."""
    table = Table(title="estimated / compiled - 1 of all rows: median of sizes (smallest to largest)")
    for column in ("case", "rows", "by cycles", "by roofline", "memory", "wire", "tau of rows", "of plans", "kept"):
        table.add_column(column)
    everything: list[Row] = []
    for store in stores:
        rows = comparable(store)
        everything += rows
        plans = with_best_options(rows)
        kept = [row for row in plans if _as_planned(row)]
        taus = (f"{tau(plans):.2f}", f"{tau(kept):.2f} ({len(kept)} of {len(plans)})")
        table.add_row(store.case, *_errors(rows), f"{tau(rows):.2f}", *taus)
    table.add_row("all", *_errors(everything), "", "", "")
    table.add_row("that fit", *_errors([row for row in everything if row.ok]), "", "", "")
    table.add_row("as planned", *_errors([row for row in everything if _as_planned(row)]), "", "", "")
    return table


def with_best_options(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest of the rows of each plan and program variant."""
    best: dict[tuple[str, str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        best.setdefault((row.words, row.remat, row.microbatches), row)
    return list(best.values())


def _as_planned(row: Row) -> bool:
    """Whether the compiled program sends what the plan predicts."""
    return abs(row.predicted["wire_bytes"] - row.wire_bytes) <= MOST_UNPLANNED_SHARE * row.wire_bytes


def _errors(rows: Sequence[Row]) -> list[str]:
    errors = {
        "cycles": [row.predicted["step"] / row.step["cycles"] - 1 for row in rows if "cycles" in row.step],
        "roofline": [row.predicted["step"] / row.step["roofline"] - 1 for row in rows],
        "memory": [row.predicted["memory_bytes"] / peak - 1 for row in rows if (peak := row.needed_bytes)],
        "wire": [row.predicted["wire_bytes"] / row.wire_bytes - 1 for row in rows if row.wire_bytes],
    }
    cells = [f"{median(map(abs, e)):.1%} ({min(e):+.0%} to {max(e):+.0%})" if e else "-" for e in errors.values()]
    return [str(len(rows)), *cells]


def tau(rows: Sequence[Row], measure: str = "") -> float:
    """Return Kendall's tau of predicted and compiled step time, over pairs of rows more than 3 % apart.

    Args:
        rows: compiled rows of one program.
        measure: the measure of the compiled time; by default `Row.seconds`.
    """
    seconds = [row.step[measure] if measure else row.seconds for row in rows]
    concordant = total = 0
    for (a, one), (b, other) in combinations(zip(seconds, rows, strict=True), 2):
        if max(a, b) <= LEAST_RANKED_RATIO * min(a, b):
            continue
        total += 1
        agree = (a - b) * (one.predicted["step"] - other.predicted["step"])
        concordant += 1 if agree > 0 else -1
    return concordant / total if total else float("nan")


def pair_errors(stores: Sequence[Store]) -> list[float]:
    """Return |log(ratio of estimates / ratio of compiled steps)| of all pairs of plans that differ in kind."""
    return [
        abs(log(one.predicted["step"] / other.predicted["step"]) - log(one.seconds / other.seconds))
        for store in stores
        for one, other in combinations([row for row in with_best_options(comparable(store)) if row.ok], 2)
        if kind_of(one.words) != kind_of(other.words)
    ]


def memory_errors(stores: Sequence[Store]) -> list[float]:
    """Return compiled / estimated peak memory - 1 of each compiled row."""
    rows = [row for store in stores for row in comparable(store)]
    return [peak / row.predicted["memory_bytes"] - 1 for row in rows if (peak := row.needed_bytes)]


def p90(values: Sequence[float]) -> float:
    """Return the 90th percentile; of one value, the value."""
    return quantiles(values, n=10)[-1] if len(values) > 1 else values[0]


def spread(errors: Sequence[float]) -> dict[str, float]:
    """Return the number of errors, their median and their 90th percentile."""
    return {"count": len(errors), "median": round(median(errors), 3), "p90": round(p90(errors), 3)}


def every_row(store: Store) -> Table:
    """Tabulate each row of a case."""
    table = Table(title=f"{store.case} on {store.target}: predicted / compiled")
    for column in ("made by", "plan", "step (s)", "memory (GiB)", "sent (GB)"):
        table.add_column(column)
    for row in sorted(comparable(store), key=lambda row: row.seconds):
        estimate, peak = row.predicted, row.needed_bytes
        table.add_row(
            row.side,
            row.name,
            f"{estimate['step']:.3f} / {row.seconds:.3f}",
            f"{estimate['memory_bytes'] / 2**30:.1f} / {peak / 2**30:.1f}" if peak else "-",
            f"{estimate['wire_bytes'] / 1e9:.2f} / {row.wire_bytes / 1e9:.2f}",
        )
    return table


def main(names: Sequence[str]) -> None:
    """Print the tables of these cases. Without names, print those of all cases and store the summary in `results`."""
    stores = [Store.read(path) for path in sorted(FOLDER.glob("*.json")) if not names or path.stem in names]
    console = Console(width=170)
    table = predicted(stores)
    console.print(*map(every_row, stores), table)
    further = {"pairs": spread(pair_errors(stores)), "memory": spread(memory_errors(stores))}
    console.print(further)
    if not names:
        columns = [(str(column.header), list(map(str, column.cells))) for column in table.columns]
        rows = [
            dict(zip((name for name, _ in columns), row, strict=True))
            for row in zip(*(cells for _, cells in columns), strict=True)
        ]
        body = {"benchmark": "cost_model", "says": str(table.title), "rows": rows, **further}
        (FOLDER.parent / "cost_model.json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
