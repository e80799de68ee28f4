"""The figures over all recipes, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import Any

from estimate_result import MEASURES
from plan_sides import Side
from recipe_rows import Result
from referee_calibration import calibrated
from rich.table import Table

FAMILIES = ("llama", "mistral", "mixtral", "gpt3")
"""The beginnings of the names of models that the figures are about."""

CALIBRATED = "calibrated"
NEAR = 0.15  # an estimate within this fraction of the measured time is near


def figures(
    results: Sequence[Result], left_out: Sequence[str] = (), referee: Mapping[tuple[str, str], float] | None = None
) -> dict[str, Any]:
    """Summarize the results.

    `predicted` and `compiled` are of the recipes' own settings, relative to the measured time. `best` are our best
    plans: predicted relative to the measured time, compiled relative to the recipe's own plan. Compiled figures are by
    measure; `calibrated` is the joined measure at the efficiency that one recipe gives the chip
    (`referee_calibration.py`). `safe` are our best plans relative to the recipe's own plan without the options for
    which wrong numbers were reported; recipes without such options count as they are. `alike` are our best plans with
    the same option sets requested, relative to the recipe's own plan. Rows whose products are planned in another
    precision are left out. `over_memory` are rows of a program that the compiler accepts although its
    arguments and temporaries exceed the memory; figures include them.

    Args:
        results: the rows.
        left_out: ids of rows that the figures leave out.
        referee: the referee's efficiencies by chip and name; None for no calibrated figures.
    """
    rows = [row for row in results if row.status == "ok" and row.model.startswith(FAMILIES)]
    out = [row.id for row in rows if row.id in left_out or not row.same_precision]
    rows = [row for row in rows if row.id not in out]

    def own(measure: str) -> Callable[[Result], float | None]:
        return lambda row: _ratio(_compiled(row.recipe, measure), row.measured)

    def ours(measure: str) -> Callable[[Result], float | None]:
        return lambda row: _ratio(_compiled(row.best, measure), _compiled(row.recipe, measure))

    def ours_to_safe(measure: str) -> Callable[[Result], float | None]:
        return lambda row: _ratio(_compiled(row.best, measure), _compiled(row.recipe_without or row.recipe, measure))

    def ours_alike(measure: str) -> Callable[[Result], float | None]:
        return lambda row: _ratio(_compiled(row.best_with or row.best, measure), _compiled(row.recipe, measure))

    def own_calibrated(row: Result) -> float | None:
        seconds = calibrated(row.recipe.compiled, row.target, row.precision, referee or {})
        return _ratio(seconds, row.measured)

    return {
        "rows": [row.id for row in rows],
        "left_out": out,
        "over_memory": [row.id for row in rows if any(map(is_over_memory, (row.recipe, row.best)))],
        "without_plan": [row.id for row in rows if row.best.seconds is None],
        "predicted": _summary([_ratio(row.recipe.seconds, row.measured) for row in rows]),
        "compiled": {name: _summary(list(map(own(name), rows))) for name in MEASURES}
        | {CALIBRATED: _summary(list(map(own_calibrated, rows)))},
        "best": {
            "predicted": _summary([_ratio(row.best.seconds, row.measured) for row in rows]),
            "compiled": {name: _summary(list(map(ours(name), rows))) for name in MEASURES},
            "safe": {name: _summary(list(map(ours_to_safe(name), rows))) for name in MEASURES},
            "alike": {name: _summary(list(map(ours_alike(name), rows))) for name in MEASURES},
        },
    }


def _compiled(side: Side, measure: str) -> float | None:
    return None if side.compiled is None else side.compiled["seconds"].get(measure)


def is_over_memory(side: Side) -> bool:
    """Return whether the compiler accepts a program whose arguments and temporaries exceed the memory.

    The compiler's analysis can count buffers that are not in the device's memory (`estimate.py`).
    """
    return side.compiled is not None and side.compiled["kind"] == "ok" and not side.compiled["fits"]


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _summary(ratios: Sequence[float | None]) -> dict[str, float] | None:
    """Median of |ratio - 1|, share within 15 %, geometric mean and largest ratio; None without ratios."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    return {
        "rows": len(known),
        "median_error": median(abs(ratio - 1) for ratio in known),
        "share_within_15_percent": sum(abs(ratio - 1) <= NEAR for ratio in known) / len(known),
        "geometric_mean": exp(sum(map(log, known)) / len(known)),
        "largest": max(known),
    }


def table(results: Sequence[Result]) -> Table:
    """Tabulate all rows. A star marks memory above the limit: estimated, or of a program that the compiler accepts."""
    found = Table(title="seconds of a step; ratios are to the measured time; *: exceeds the memory")
    for name in ("recipe", "measured", "recipe's settings", "ratio", "GiB", "compiled", "best plan", "ratio", "GiB",
                 "compiled"):  # fmt: skip
        found.add_column(name)
    for row in results:
        measured = "" if row.measured is None else f"{row.measured:.3f}"
        if row.status != "ok":
            found.add_row(row.id, measured, row.status.partition("\n")[0])
        else:
            found.add_row(row.id, measured, *_cells(row.recipe, row.measured), *_cells(row.best, row.measured))
    return found


def _cells(side: Side, measured: float | None) -> tuple[str, str, str, str]:
    if side.seconds is None:
        return "no plan", "", "", ""
    star = "" if side.fits else " *"
    ratio = _ratio(side.seconds, measured)
    judged = "" if side.compiled is None else side.compiled["kind"]
    if side.compiled is not None and side.compiled["seconds"]:
        seconds = side.compiled["seconds"]
        judged = " / ".join(f"{seconds[name]:.2f}" for name in MEASURES if name in seconds)
        judged += " *" if is_over_memory(side) else ""
    memory = f"{side.predicted['memory_bytes'] / 2**30:.1f}{star}"
    return f"{side.seconds:.2f}  {side.name}", f"{ratio:.2f}", memory, judged
