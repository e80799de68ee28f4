"""The figures of the compiled rows: the planner's plans and predictions compared with experts and common practice."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log

from cost_model import predicted
from plan_rows import Row, Store, best, measures_of
from rich.console import Console
from rich.table import Table

MEASURES = ("cycles", "roofline", "joined")


def show(stores: Sequence[Store]) -> None:
    """Print all figures of these cases."""
    console = Console(width=150)
    console.print(_comparison_table(stores), predicted(stores))
    for store in stores:
        reached = sum(p["why"] != "not reached" for p in store.pruned)
        left = len(store.pruned) - reached
        console.print(f"{store.case}: bounds rule out {reached} programs of the grid; {left} were not reached")


def _comparison_table(stores: Sequence[Store]) -> Table:
    table = Table(title="compiled step time (s)")
    for column in ("case", "by", "expert", "plan", "plan / expert", "without verify", "today / plan", "GiB of both"):
        table.add_column(column)
    ratios: dict[str, list[dict[str, float]]] = {measure: [] for measure in MEASURES}
    for store in stores:
        expert, plan, chosen, today = winners(store)
        pairs = {"plan": (plan, expert), "chosen": (chosen, expert), "today": (today, plan)}
        for measure, found in ratios.items():
            found.append({
                name: one.step[measure] / other.step[measure]
                for name, (one, other) in pairs.items()
                if one and other and one.ok and measure in one.step and measure in other.step
            })  # fmt: skip
        table.add_row(
            store.case,
            " / ".join(name for name in MEASURES if name in measures_of(store.rows)),
            _time(expert),
            _time(plan),
            *(_ratio(one, other) for one, other in pairs.values()),
            f"{_gib(plan)} / {_gib(expert)}",
        )
    for measure, found in ratios.items():
        columns = [[each[name] for each in found if name in each] for name in ("plan", "chosen", "today")]
        means = [f"{_mean(column):.3f} of {len(column)}" if column else "-" for column in columns]
        table.add_row("geometric mean", measure, "", "", *means, "")
    return table


def winners(store: Store) -> tuple[Row | None, Row | None, Row | None, Row | None]:
    """Return the expert's best, the planner's best, the planner's choice without a compiler, and common practice."""
    side = {name: [row for row in store.rows if row.side == name] for name in ("expert", "plan", "today")}
    fitting = [row for row in side["plan"] if row.predicted.get("memory_bytes", 0.0) <= (row.limit_bytes or inf)]
    chosen = min(fitting, key=lambda row: (row.predicted.get("step", 1e9), row.seconds), default=None)
    return best(side["expert"]), best(side["plan"]), chosen, next(iter(side["today"]), None)


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
    return f"{row.needed_bytes / 2**30:.1f}" if row is not None and row.needed_bytes else "-"
