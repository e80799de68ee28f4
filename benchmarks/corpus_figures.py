"""The figures of the compiled corpus: plans against experts, errors of the estimate by kind of plan, and regret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import median
from typing import Any

from cost_model import p90, tau
from plan_rows import Row, Store, best
from rich.console import Console
from rich.table import Table

from autoshard.sharding.search.strategy_kinds import KINDS, kind_of


def chosen_row(store: Store) -> Row | None:
    """Return the row of the plan that the planner chose; None if it was not compiled."""
    return next((r for r in store.rows if r.side == "plan" and r.words == store.notes.get("chosen")), None)


def best_expert(store: Store) -> Row | None:
    """Return the expert's fastest row that fits."""
    return best([row for row in store.rows if row.side == "expert"])


def figures(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the figures of the corpus.

    `over_expert` divides the compiled step of the chosen plan by that of the best expert: the worst and the geometric
    mean. `regret` divides it by that of the planner's fastest compiled plan, minus 1. `errors` are predicted over
    compiled steps, minus 1, by kind of plan; `memory_errors` are the same for peak memory. `tau` is the median rank
    correlation of predicted and compiled steps.
    """
    over, regret, errors, memory_errors = [], [], {}, {}
    for store in stores:
        chosen, expert, ours = chosen_row(store), best_expert(store), best([r for r in store.rows if r.side == "plan"])
        if chosen is not None and chosen.ok and expert is not None:
            over.append(chosen.seconds / expert.seconds)
        if chosen is not None and chosen.ok and ours is not None:
            regret.append(chosen.seconds / ours.seconds - 1)
        for row in _judged(store):
            errors.setdefault(kind_of(row.words), []).append(row.predicted["step"] / row.seconds - 1)
            if row.needed_bytes and row.predicted.get("memory_bytes"):
                error = row.predicted["memory_bytes"] / row.needed_bytes - 1
                memory_errors.setdefault(kind_of(row.words), []).append(error)
    taus = [value for store in stores if (value := tau(_judged(store))) == value]
    return {
        "programs": len(stores),
        "over_expert": {
            "worst": max(over, default=None),
            "mean": exp(sum(map(log, over)) / len(over)) if over else None,
        },
        "regret": {"median": median(regret), "p90": p90(regret)} if regret else {},
        "errors": {kind: _spread(errors[kind]) for kind in KINDS if kind in errors},
        "memory_errors": {kind: _spread(memory_errors[kind]) for kind in KINDS if kind in memory_errors},
        "tau": median(taus) if taus else None,
    }


def _judged(store: Store) -> list[Row]:
    return [row for row in store.rows if row.kind == "ok" and row.predicted.get("step")]


def _spread(errors: Sequence[float]) -> Mapping[str, float]:
    sizes = [abs(error) for error in errors]
    return {"rows": len(errors), "median": median(sizes), "p90": p90(sizes), "lowest": min(errors)}


def show(stores: Sequence[Store]) -> None:
    """Print each program's rows in short, and the figures."""
    table = Table(title="compiled step: the planner's choice against the best expert")
    for column in ("program", "chosen", "ms", "predicted", "expert", "ms", "ratio", "planning s"):
        table.add_column(column)
    for store in stores:
        chosen, expert = chosen_row(store), best_expert(store)
        ratio = f"{chosen.seconds / expert.seconds:.3f}" if chosen and chosen.ok and expert else "-"
        cells = [store.notes.get("chosen", store.notes.get("planner", "")), *_times(chosen)]
        expert_cells = [expert.style, _times(expert)[0]] if expert else ["-", "-"]
        table.add_row(store.case, *cells, *expert_cells, ratio, str(store.notes.get("planning_seconds", "")))
    console = Console(width=170)
    console.print(table)
    console.print_json(data=figures(stores))


def _times(row: Row | None) -> list[str]:
    if row is None:
        return ["-", "-"]
    compiled = f"{row.seconds * 1e3:.1f}" if row.ok else "does not fit" if row.too_large else row.kind
    return [compiled, f"{row.predicted['step'] * 1e3:.1f}"]
