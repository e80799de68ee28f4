"""What the planner says of plans against what the compiler made of them.

    python benchmarks/cost_model.py [CASE ...]

Of every program that `bench_plans.py` compiled and that has a plan in the planner's words: an expert's, too, which is
another program for the same plan. Predicted / compiled for the step (the compiler's cycles, and a roofline of what was
compiled), for the peak of memory and for the bytes sent; the median error of each; and Kendall's tau of the order of
step times: of all rows; of plans, each with the compiler options that serve it best; and of those of them that the
compiler kept to, whose bytes sent are within 10 % of the plan's. The planner's estimate knows nothing of options: rows
that differ in them alone are a pair that it cannot rank. Nor does it know what the compiler sends beyond a plan: an
expert's constraints leave that to it, and the audit tells it of the planner's own. Programs that do not fit are among
the rows where a compiler makes them all the same (a GPU's, which then computes much of them twice): those that fit have
a line of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import combinations
from statistics import median

from plan_rows import FOLDER, Row, Store
from rich.console import Console
from rich.table import Table

UNPLANNED = 0.10  # of the bytes sent, up to which a program is as planned
APART = 1.03  # plans whose times differ by less are no pair to rank


def able(store: Store) -> list[Row]:
    """The rows of which the planner has said something, and the compiler too."""
    return [row for row in store.rows if row.kind == "ok" and row.predicted.get("memory_bytes")]


def predicted(stores: Sequence[Store]) -> Table:
    """Errors of the planner's estimates by case: median of their sizes, smallest and largest."""
    table = Table(title="estimated / compiled - 1 of all rows: median of sizes (smallest to largest)")
    for column in ("case", "rows", "step", "step by roofline", "memory", "wire", "tau of rows", "of plans", "kept"):
        table.add_column(column)
    everything: list[Row] = []
    for store in stores:
        rows = able(store)
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
    """Of rows of the same plan and program variant, the fastest."""
    best: dict[tuple[str, str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        best.setdefault((row.words, row.remat, row.microbatches), row)
    return list(best.values())


def _as_planned(row: Row) -> bool:
    """Whether the compiler sends what the plan says."""
    said, sent = row.predicted["wire_bytes"], row.wire_bytes
    return abs(said - sent) <= UNPLANNED * sent


def _errors(rows: Sequence[Row]) -> list[str]:
    errors = {
        "step": [row.predicted["step"] / row.seconds - 1 for row in rows],
        "roofline": [row.predicted["step"] / row.step["roofline"] - 1 for row in rows],
        "memory": [row.predicted["memory_bytes"] / peak - 1 for row in rows if (peak := row.held)],
        "wire": [row.predicted["wire_bytes"] / row.wire_bytes - 1 for row in rows if row.wire_bytes],
    }
    said = [f"{median(map(abs, e)):.1%} ({min(e):+.0%} to {max(e):+.0%})" if e else "-" for e in errors.values()]
    return [str(len(rows)), *said]


def tau(rows: Sequence[Row]) -> float:
    """Kendall's tau of predicted and compiled step time, over pairs of rows more than 3 % apart."""
    concordant = total = 0
    for one, other in combinations(rows, 2):
        if max(one.seconds, other.seconds) <= APART * min(one.seconds, other.seconds):
            continue
        total += 1
        agree = (one.seconds - other.seconds) * (one.predicted["step"] - other.predicted["step"])
        concordant += 1 if agree > 0 else -1
    return concordant / total if total else float("nan")


def every_row(store: Store) -> Table:
    """Each row of a case."""
    table = Table(title=f"{store.case} on {store.target}: predicted / compiled")
    for column in ("made by", "plan", "step (s)", "memory (GiB)", "sent (GB)"):
        table.add_column(column)
    for row in sorted(able(store), key=lambda row: row.seconds):
        said, peak = row.predicted, row.held
        table.add_row(
            row.side,
            row.name,
            f"{said['step']:.3f} / {row.seconds:.3f}",
            f"{said['memory_bytes'] / 2**30:.1f} / {peak / 2**30:.1f}" if peak else "-",
            f"{said['wire_bytes'] / 1e9:.2f} / {row.wire_bytes / 1e9:.2f}",
        )
    return table


def main(names: Sequence[str]) -> None:
    """Prints the tables of these cases; or of all that there are, and keeps the last one under `results`."""
    found = [Store.read(path) for path in sorted(FOLDER.glob("*.json")) if not names or path.stem in names]
    console = Console(width=170)
    table = predicted(found)
    console.print(*map(every_row, found), table)
    if not names:
        columns = [(str(column.header), list(map(str, column.cells))) for column in table.columns]
        rows = [
            dict(zip((name for name, _ in columns), row, strict=True))
            for row in zip(*(cells for _, cells in columns), strict=True)
        ]
        kept = {"benchmark": "cost_model", "says": str(table.title), "rows": rows}
        (FOLDER.parent / "cost_model.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
