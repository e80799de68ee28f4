"""Calibrates the referee's joined measure: one efficiency for each chip, from one compiled recipe.

At this efficiency, the estimate of the compiled recipe equals its measured time. The recipes are those of
`recipe_calibration.ROWS`, with their own XLA options. The efficiency scales compute, but not exposed communication:

    calibrated = joined compute / efficiency + exposed

A chip without such a recipe, or whose recipe is not compiled, has no calibrated estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
from plan_rows import Store
from recipe_calibration import ROWS
from recipe_file import OWN, read_recipes

JOINED = "joined"


def compute_and_exposed(compiled: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """Return the joined seconds of compute, and the exposed seconds; None if the program was not judged by them."""
    if not compiled or JOINED not in compiled["seconds"]:
        return None
    exposed = compiled["exposed_seconds"][JOINED]
    return compiled["seconds"][JOINED] - exposed, exposed


def efficiencies(folder: Path = common.RESULTS / "recipes") -> dict[tuple[str, str], float]:
    """Return the efficiency by chip and name (`efficiency`, `efficiency_fp8`), from the stored rows of `folder`."""
    measured = {entry.id: entry.recipe.seconds for entry in read_recipes(OWN) if entry.recipe is not None}
    found = {}
    for key, recipe in ROWS.items():
        path = folder / f"{recipe}.json"
        rows = Store.read(path).rows if path.exists() else []
        for row in (row for row in rows if row.side == "recipe" and row.kind == "ok"):
            parts = compute_and_exposed({"seconds": row.step, "exposed_seconds": row.exposed})
            if parts is not None:
                found[key] = parts[0] / (measured[recipe] - parts[1])
    return found


def calibrated(
    compiled: Mapping[str, Any] | None, target: str, precision: str, known: Mapping[tuple[str, str], float]
) -> float | None:
    """Return the calibrated seconds of a compiled step on a target; None if they are not known.

    Args:
        compiled: the figures of a compiled plan (`Side.compiled`).
        target: the machine, such as `v6e:4x4`.
        precision: of the products, such as `bf16` or `fp8`.
        known: the efficiencies.
    """
    parts = compute_and_exposed(compiled)
    name = "efficiency_fp8" if precision.startswith("fp8") else "efficiency"
    efficiency = known.get((target.partition(":")[0], name))
    return None if parts is None or efficiency is None else parts[0] / efficiency + parts[1]
