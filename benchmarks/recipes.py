"""Compare the planner with step times that others measured on real pods.

    python benchmarks/recipes.py [--recipes FILE] [--json OUT] [--only ID ...] [--leave-out ID ...]
                                 [--schedule | --predict-only]

For each recipe of FILE (by default `data/recipes.toml`), two plans are made for its model, batch and machine:

    recipe   the recipe's own settings: its mesh and what its layers keep for the backward pass
    plan     our best plan by its estimate, over all variants that keep the values, with values on the host

Both are predicted and, without `--predict-only`, compiled for the machine and judged by `estimate.py`. The recipe's own
plan is compiled with its own XLA options if they are known, and again without those for which wrong numbers were
reported (`recipe_without`). Our best plan has none of the reported options; `plan_with` is our best plan if they are
requested. In the recipe's own plan, XLA chooses when loops move slices of stacks in host memory and their layout, as in
the published program. Our own plans say it themselves (`lower/tpu/host_stacks.py`, `stack_layouts.py`). A plan with
values in host memory is also scheduled under the option sets `host-link` and `slow-host-link`. The fastest schedule by
the roofline, with one of the sets or without, counts and is compiled. `verify` tries these sets, too. A compiler runs
in a process of its own, with a time limit. With `--schedule`, no machine code is generated: a program takes seconds
instead of minutes, and is judged by the roofline only. Programs with stored rows keep the measures of these.

Compiled rows are stored in `results/recipes/`; a program that is there, or in the compiler's cache, is not compiled
again. A program that the compiler accepts counts, also if its arguments and temporaries exceed the memory; a star in
the table and `over_memory` in the figures mark it. Recipes whose model or machine is not available, or that cannot be
read, are listed with the reason. Where our models lack something that a recipe has, the row's notes say what is planned
in its place (`recipe_stand_ins.py`).

One efficiency of each TPU and, for tpu7x, one of its fp8 products are calibrated on one recipe each, for the planner's
estimate (`recipe_calibration.py`) and for the referee's (`referee_calibration.py`). Nothing else is fitted to any. The
figures leave these recipes out, and those that `--leave-out` names. The exit code is 1 if a row cannot be read, and 2
if the file cannot.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import PACKAGES
from plan_rows import add_schedule_option, requested_until
from plan_sides import Side
from recipe_calibration import ROWS
from recipe_figures import figures, table
from recipe_file import OWN, RecipeFileError, read_recipes
from recipe_rows import Result, result_of
from referee_calibration import efficiencies
from rich.console import Console

_SIDES = ("recipe", "best", "recipe_without", "best_with")  # of a result
TIMEOUT_S = 600.0  # chosen: seconds after which a compiler is stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipes of the command line and return the exit code."""
    given = _parser().parse_args(arguments)
    try:
        entries = read_recipes(given.recipes)
    except RecipeFileError as error:
        print(error, file=sys.stderr)
        return 2
    known = [entry.id for entry in entries]
    if unknown := [name for name in (*given.only, *given.leave_out) if name not in known]:
        print(f"{given.recipes} has no recipe {', '.join(unknown)}; it has {', '.join(known)}", file=sys.stderr)
        return 2
    results: list[Result] = []
    for entry in entries:
        if given.only and entry.id not in given.only:
            continue
        until = requested_until(given)
        results.append(result_of(entry, compile_plans=not given.predict_only, timeout_s=given.timeout, until=until))
        print(_line(results[-1]), flush=True)
        if given.json is not None:  # after each row, so that a run that is stopped leaves what it has
            given.json.write_text(json.dumps(_document(given, results), indent=1) + "\n")
    console = Console(width=180)
    console.print(table(results))
    console.print_json(json.dumps(figures(results, (*given.leave_out, *ROWS.values()), efficiencies())))
    return 1 if any(entry.problems for entry in entries) else 0


def _line(row: Result) -> str:
    if row.status != "ok":
        return f"{row.id}: {row.status}"
    reported = [f"option set {each}" for each in row.reported]
    notes = "".join(f"\n    {note}" for note in (*row.notes, *reported))
    problems = "".join(f"\n    {name}: {side.problem}" for name, side in _sides(row).items() if side.problem)
    return f"{row.id}: {row.recipe.name or 'no plan'} | {row.best.name or 'no plan'}{notes}{problems}"


def _sides(row: Result) -> dict[str, Side]:
    sides = {"recipe": row.recipe, "plan": row.best, "recipe_without": row.recipe_without, "plan_with": row.best_with}
    return {name: side for name, side in sides.items() if side is not None}


def _document(given: argparse.Namespace, results: Sequence[Result]) -> dict[str, Any]:
    """The JSON: figures, and for each id its status and both plans with their predicted and compiled figures."""
    rows = {}
    for row in results:
        fields = {name: value for name, value in vars(row).items() if name not in ("id", *_SIDES)}
        sides = {name: asdict(side) | {"fits": side.fits} for name, side in _sides(row).items()}
        rows[row.id] = fields | (sides if row.status == "ok" else {})
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": given.recipes.name,
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
        "figures": figures(results, (*given.leave_out, *ROWS.values()), efficiencies()),
        "recipes": rows,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", type=Path, default=OWN, help="a file of recipes; default: data/recipes.toml")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="recipes to run; default: all")
    parser.add_argument(
        "--leave-out", nargs="+", default=[], metavar="ID",
        help="recipes that the figures leave out, besides those that a chip's efficiency is calibrated on",
    )  # fmt: skip
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--predict-only", action="store_true", help="compile nothing")
    add_schedule_option(extent)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds after which a compiler is stopped")
    return parser


if __name__ == "__main__":
    sys.exit(main())
