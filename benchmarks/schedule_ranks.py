"""Test whether the roofline of a schedule ranks plans as their machine code does, over stored rows.

    python benchmarks/schedule_ranks.py

`verify` compares plans by the roofline of their schedules, which the compiler makes in seconds. This reads all stored
programs of the corpus that have machine code, and compares their rooflines with the joined measure of `estimate.py`,
which has the compiler's cycles for products. For each case with at least two programs, it prints:

    tau      Kendall's tau of the two measures, over all pairs of programs
    chosen   joined time of the program with the least roofline, divided by the least joined time
    cycles   the same for the program with the fewest cycles

The schedule before machine code is generated has the same instructions, collectives and buffers as the whole program
(`tests/sharding/audit/test_scheduled_programs.py`), so the rooflines of stored programs, by `estimate.py`, are those of
their schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import common  # noqa: F401  sets up the path and the devices first
from common import RESULTS
from plan_rows import Row, Store
from scipy.stats import kendalltau


def programs(store: Store) -> list[Row]:
    """Return the programs of a case that fit and have machine code, each once."""
    found = {row.digest: row for row in store.rows if row.ok and "joined" in row.step}
    return list(found.values())


def tau(rows: Sequence[Row], one: str, other: str) -> float:
    """Return Kendall's tau of two measures over the rows."""
    found: Any = kendalltau(*([row.step[measure] for row in rows] for measure in (one, other)))
    return float(found.statistic)


def chosen(rows: Sequence[Row], measure: str) -> float:
    """Return the joined time of the best row by a measure, divided by the least joined time."""
    return min(rows, key=lambda row: row.step[measure]).step["joined"] / min(row.step["joined"] for row in rows)


def main() -> None:
    """Print one line per case, and the medians."""
    stores = [Store.read(path) for path in sorted((RESULTS / "formulations").glob("*.json"))]
    cases = {store.case: rows for store in stores if len(rows := programs(store)) > 1}
    taus = {case: tau(rows, "roofline", "joined") for case, rows in cases.items()}
    ratios = {case: chosen(rows, "roofline") for case, rows in cases.items()}
    print(f"{'case':40} programs    tau  chosen  cycles")
    for case, rows in cases.items():
        print(f"{case:40} {len(rows):8} {taus[case]:6.2f} {ratios[case]:7.3f} {chosen(rows, 'cycles'):7.3f}")
    print(
        f"{len(cases)} cases: tau {median(taus.values()):.2f} in the median, chosen at worst {max(ratios.values()):.4f}"
    )


if __name__ == "__main__":
    main()
