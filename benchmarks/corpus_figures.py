"""The figures of the compiled corpus: plans against experts, errors of the estimate by kind of plan, and regret."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import Any

from cost_model import p90, tau
from estimate_result import MEASURES
from plan_rows import Row, Store
from rich.console import Console
from rich.table import Table

from autoshard.sharding.search.constants import MOST_KIND_ERROR
from autoshard.sharding.search.strategy_kinds import KINDS, kind_of

UNASKED = ("unplanned", "rematerializations")  # what a compiler adds to a plan (`bench_formulations.audited`)


def chosen_row(store: Store) -> Row | None:
    """Return the row of the plan that the planner chose; None if it was not compiled."""
    return next((r for r in store.rows if r.side == "plan" and r.words == store.notes.get("chosen")), None)


def verified_row(store: Store) -> Row | None:
    """Return the row of the plan that `verify="auto"` would choose among the rows; None if it is not among them.

    It is the fastest by its schedule, which the roofline judges. It is of those that the estimate finds at most
    `MOST_KIND_ERROR` slower than the chosen plan.
    """
    chosen = chosen_row(store)
    if chosen is None:
        return None
    most = (1 + MOST_KIND_ERROR) * chosen.predicted["step"]
    rivals = [row for row in store.rows if row.side == "plan" and row.ok and "roofline" in row.step]
    rivals = [row for row in rivals if row.predicted["step"] <= most]
    return min(rivals, key=lambda row: row.step["roofline"], default=None)


def best_expert(store: Store, measure: str = "cycles") -> Row | None:
    """Return the expert's row that fits and is the fastest by a measure."""
    return _fastest(store, "expert", measure)


def figures(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the figures of the corpus.

    For each measure of compiled steps (`estimate.py`), over the rows that have it: `over_expert` divides the compiled
    step of the chosen plan by that of the best expert: the number of programs, the worst and the geometric mean.
    `verified_over_expert` is the same of the plan that `verify="auto"` would choose (`verified_row`).
    `regret` divides it by that of the planner's fastest compiled plan, minus 1. `errors` are predicted over compiled
    steps of the planner's own programs, minus 1, by kind of plan. `expert_errors` are the same for the experts'
    programs, whose activations the compiler shards as it likes. `tau` is the median rank correlation of predicted and
    compiled steps of all of them. `memory_errors` and `expert_memory_errors` are the same for peak memory; they have no
    measure. `audits` lists what the compiler added to the chosen plans (unplanned collectives and involuntary
    rematerializations), and idle devices.
    """
    return {
        "programs": len(stores),
        **{measure: _figures(stores, measure) for measure in MEASURES},
        **{name: _by_kind(_memory_errors(stores, side)) for side, name in _named("memory_errors")},
        "audits": _audits(stores),
    }


def _audits(stores: Sequence[Store]) -> dict[str, Any]:
    """What the compiler added to the chosen plans: the number of audited programs, and the causes by program."""
    audits = {store.case: store.notes["audit"] for store in stores if store.notes.get("audit")}
    return {
        "programs": len(audits),
        **{name: {case: each[name] for case, each in audits.items() if each[name]} for name in UNASKED},
        "idle": {store.case: store.notes["idle"] for store in stores if store.notes.get("idle")},
    }


def _figures(stores: Sequence[Store], measure: str) -> dict[str, Any]:
    over, verified, regret = [], [], []
    for store in stores:
        best, expert = verified_row(store), best_expert(store, measure)
        if best is not None and expert is not None and measure in best.step:
            verified.append(best.step[measure] / expert.step[measure])
        chosen = chosen_row(store)
        if chosen is None or not chosen.ok or measure not in chosen.step:
            continue
        if expert is not None:
            over.append(chosen.step[measure] / expert.step[measure])
        if ours := _fastest(store, "plan", measure):
            regret.append(chosen.step[measure] / ours.step[measure] - 1)
    judged = [[row for row in _judged(store) if measure in row.step] for store in stores]
    taus = [value for rows in judged if (value := tau(rows, measure)) == value]
    return {
        "over_expert": _ratio_summary(over),
        "verified_over_expert": _ratio_summary(verified),
        "regret": {"median": median(regret), "p90": p90(regret)} if regret else {},
        **{
            name: _by_kind(
                (row.words, row.predicted["step"] / row.step[measure] - 1)
                for rows in judged
                for row in rows
                if row.side == side
            )
            for side, name in _named("errors")
        },
        "tau": median(taus) if taus else None,
    }


def _ratio_summary(ratios: Sequence[float]) -> dict[str, Any]:
    mean = exp(sum(map(log, ratios)) / len(ratios)) if ratios else None
    return {"programs": len(ratios), "worst": max(ratios, default=None), "mean": mean}


def _named(figure: str) -> list[tuple[str, str]]:
    """The sides of a program's rows, each with the name of a figure about them."""
    return [("plan", figure), ("expert", f"expert_{figure}")]


def _memory_errors(stores: Sequence[Store], side: str) -> Iterator[tuple[str, float]]:
    for row in (row for store in stores for row in _judged(store) if row.side == side):
        if row.needed_bytes and row.predicted.get("memory_bytes"):
            yield row.words, row.predicted["memory_bytes"] / row.needed_bytes - 1


def _fastest(store: Store, side: str, measure: str) -> Row | None:
    rows = [row for row in store.rows if row.side == side and row.ok and measure in row.step]
    return min(rows, key=lambda row: row.step[measure], default=None)


def _by_kind(errors: Iterable[tuple[str, float]]) -> dict[str, Mapping[str, float]]:
    found: dict[str, list[float]] = {}
    for words, error in errors:
        found.setdefault(kind_of(words), []).append(error)
    return {kind: _spread(found[kind]) for kind in KINDS if kind in found}


def _judged(store: Store) -> list[Row]:
    return [row for row in store.rows if row.kind == "ok" and row.predicted.get("step")]


def _spread(errors: Sequence[float]) -> Mapping[str, float]:
    sizes = [abs(error) for error in errors]
    return {"rows": len(errors), "median": median(sizes), "p90": p90(sizes), "lowest": min(errors)}


def show(stores: Sequence[Store]) -> None:
    """Print each program's rows in short, and the figures."""
    table = Table(title=f"compiled step, ms by {' / '.join(MEASURES)}: the planner's choice against the best expert")
    for column in ("program", "chosen", "ms", "predicted", "expert", "ms", "ratio", "planning s"):
        table.add_column(column)
    for store in stores:
        chosen, expert = chosen_row(store), best_expert(store) or best_expert(store, "roofline")
        predicted = f"{chosen.predicted['step'] * 1e3:.1f}" if chosen else "-"
        cells = [store.notes.get("chosen", store.notes.get("planner", "")), _times(chosen), predicted]
        expert_cells = [expert.style, _times(expert)] if expert else ["-", "-"]
        planning = str(store.notes.get("planning_seconds", ""))
        table.add_row(store.case, *cells, *expert_cells, _ratios(store, chosen), planning)
    console = Console(width=200)
    console.print(table)
    console.print_json(data=figures(stores))


def _times(row: Row | None) -> str:
    if row is None or not row.ok:
        return "-" if row is None else "does not fit" if row.too_large else row.kind
    return " / ".join(f"{row.step[measure] * 1e3:.1f}" for measure in MEASURES if measure in row.step)


def _ratios(store: Store, chosen: Row | None) -> str:
    """The chosen plan over the best expert, each by one measure."""
    found = []
    for measure in MEASURES:
        expert = best_expert(store, measure)
        if chosen is not None and chosen.ok and expert and measure in chosen.step:
            found.append(f"{chosen.step[measure] / expert.step[measure]:.3f}")
    return " / ".join(found) or "-"
