"""What the compiled rows say: plans against the expert's, against today's practice, and predictions against both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import exp, log
from statistics import median

from plan_rows import Row, Store, best
from rich.console import Console
from rich.table import Table

APART = 1.03  # plans whose times differ by less are no pair to rank
MEASURES = ("cycles", "roofline")


def show(stores: Sequence[Store]) -> None:
    """Prints all figures of these cases."""
    console = Console(width=150)
    console.print(_against(stores), _predicted(stores))
    for store in stores:
        reached = sum(p["why"] != "not reached" for p in store.pruned)
        left = len(store.pruned) - reached
        console.print(f"{store.case}: {reached} programs of the grid ruled out by bounds, {left} not reached")


def _against(stores: Sequence[Store]) -> Table:
    table = Table(title="compiled step time (s): cycles / roofline")
    for column in ("case", "expert", "plan", "plan / expert", "without verify", "today / plan", "GiB plan / expert"):
        table.add_column(column)
    ratios: dict[str, list[float]] = {name: [] for name in ("plan", "chosen", "today")}
    for store in stores:
        expert, plan, chosen, today = winners(store)
        pairs = {"plan": (plan, expert), "chosen": (chosen, expert), "today": (today, plan)}
        for name, (one, other) in pairs.items():
            if one is not None and other is not None and one.ok:
                ratios[name].append(one.seconds / other.seconds)
        table.add_row(
            store.case,
            _time(expert),
            _time(plan),
            *(_ratio(one, other) for one, other in pairs.values()),
            f"{_gib(plan)} / {_gib(expert)}",
        )
    means = [f"{_mean(found):.3f}" if found else "-" for found in ratios.values()]
    table.add_row("geometric mean", "", "", *means, "")
    return table


def winners(store: Store) -> tuple[Row | None, Row | None, Row | None, Row | None]:
    """The expert's best, the planner's best, the planner's own choice without a compiler, and today's practice."""
    side = {name: [row for row in store.rows if row.side == name] for name in ("expert", "plan", "today")}
    chosen = min(side["plan"], key=lambda row: (row.predicted.get("step", 1e9), row.seconds), default=None)
    return best(side["expert"]), best(side["plan"]), chosen, next(iter(side["today"]), None)


def _predicted(stores: Sequence[Store]) -> Table:
    table = Table(title="the planner's estimate / what was compiled, all rows with an estimate")
    for column in ("case", "rows", "step: median error", "memory: median error", "wire: median error", "tau"):
        table.add_column(column)
    everything: list[Row] = []
    for store in stores:
        rows = [row for row in store.rows if row.ok and row.predicted.get("memory_bytes")]
        everything += rows
        table.add_row(store.case, *_errors(rows), f"{tau(rows):.2f}")
    table.add_row("all", *_errors(everything), "")
    return table


def _errors(rows: Sequence[Row]) -> list[str]:
    errors = {
        "step": [row.predicted["step"] / row.seconds - 1 for row in rows],
        "memory": [row.predicted["memory_bytes"] / row.memory_bytes - 1 for row in rows if row.memory_bytes],
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


def _mean(ratios: Sequence[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{' / '.join(f'{row.step[name]:.3f}' for name in MEASURES if name in row.step) or row.kind}  {row.name}"


def _ratio(one: Row | None, other: Row | None) -> str:
    if one is None or other is None:
        return "-"
    if not one.ok or not other.ok:
        return one.kind
    return " / ".join(f"{one.step[name] / other.step[name]:.3f}" for name in MEASURES if name in other.step)


def _gib(row: Row | None) -> str:
    return f"{row.memory_bytes / 2**30:.1f}" if row is not None and row.memory_bytes else "-"
