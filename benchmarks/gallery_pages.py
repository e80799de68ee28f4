"""The gallery's pages: an index with the measured recipes, and a page for each model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common

PAGES = Path(__file__).resolve().parent.parent / "docs" / "gallery"
RECIPES = common.RESULTS / "recipes.json"
MEASURES = ("cycles", "roofline")

Cell = Mapping[str, Any]

_INDEX = """# Gallery

Plans of {models} public models for {machines} machines of 256 chips each. Every chip gets the same share of the batch:
16,384 tokens or 64 images. Nothing was run. `predicted` is the planner's estimate. `compiled` is what an independent
estimate (`benchmarks/estimate.py`) says about the program that the machine's own compiler made: a time by its cycles,
and a time by a roofline of operations and bytes. Where there is one time, it is the roofline: on TPUs of the compiler's
schedule, without machine code; on GPUs of the compiled program, because their compiler states no cycles.

A cell shows the predicted step time. Below it is the model FLOPs utilization (MFU): the products of a step without
recomputation, divided by the step time and the chips' peak. "does not fit" means that no plan fits the memory.
Empty cells are not planned yet; `--missing` plans them.

    python benchmarks/gallery.py            # plans everything again and writes these pages
    python benchmarks/gallery.py llama3.1-8b --target v6e:16x16 --schedule
    python benchmarks/gallery.py llama3.1-8b --target h100:32x8 --schedule      # needs the extra aot-cuda

{table}

## Measured recipes

Step times that others published from real pods (`benchmarks/data/recipes.toml` names the sources), in seconds. The
recipe's own settings, as a plan, show how good the estimate is. Our best plan shows what the planner makes of the same
model, batch and machine. Planned on {date}; `python benchmarks/recipes.py` does it again.

{recipes}
"""

_PAGE = """# {model}

Planned for machines of 256 chips. The columns are explained in the [gallery](index.md).

{table}

{sections}
"""


def write_pages(cells: Mapping[str, Mapping[str, Cell]], folder: Path = PAGES, recipes: Path = RECIPES) -> None:
    """Write the index and a page for each model.

    Args:
        cells: model -> target -> the stored figures.
        folder: the folder of the pages. Pages of models that are gone are removed.
        recipes: the stored figures of the recipes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("*.md"):
        page.unlink()
    for model, row in cells.items():
        (folder / f"{model}.md").write_text(_page(model, row))
    stored = json.loads(recipes.read_text())
    machines = list(dict.fromkeys(target for row in cells.values() for target in row))
    counts = {"models": len(cells), "machines": len(machines)}
    recipe_rows = _table(("recipe", "measured", "its settings", "ratio", "our best plan", "ratio"), _recipes(stored))
    table = _table(("model", *machines), (_index_row(model, row, machines) for model, row in cells.items()))
    text = _INDEX.format(**counts, table=table, recipes=recipe_rows, date=stored["date"][:10])
    (folder / "index.md").write_text(text)


def mfu(cell: Cell, seconds: float) -> float:
    """Return the model FLOPs utilization of a step that takes these seconds."""
    return cell["least_seconds"] / seconds


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _index_row(model: str, row: Mapping[str, Cell], machines: Sequence[str]) -> list[str]:
    return [f"[{model}]({model}.md)", *(_short(row[each]) if each in row else "" for each in machines)]


def _short(cell: Cell) -> str:
    if not cell["predicted"]:
        return "does not fit" if "no plan fits" in cell["problem"] else "no plan"
    seconds = cell["predicted"]["seconds"]
    return f"{_seconds(seconds)}<br>{mfu(cell, seconds):.0%}"


def _page(model: str, row: Mapping[str, Cell]) -> str:
    names = ("machine", "batch", "plan", "layers keep", "memory of a device", "predicted step", "MFU", "compiled step",
             "compiled memory", "date")  # fmt: skip
    rows = ([target, *_line(cell)] for target, cell in row.items())
    sections = "\n\n".join(_section(target, cell) for target, cell in row.items())
    return _PAGE.format(model=model, table=_table(names, rows), sections=sections)


def _line(cell: Cell) -> list[str]:
    batch = f"{cell['batch_size']:,}" + (f" x {cell['context']:,}" if cell["context"] else "")
    if not cell["predicted"]:
        return [batch, "none", "", "", "", "", "", "", cell["date"]]
    predicted, compiled = cell["predicted"], cell["compiled"]
    words = f"`{cell['words']}`" + (f", {cell['microbatches']} microbatches" if cell["microbatches"] > 1 else "")
    memory = _of_limit(predicted["memory_bytes"], predicted["limit_bytes"])
    if predicted["host_bytes"]:
        memory += f", {_gib(predicted['host_bytes'])} on the host"
    step, peak = "not compiled", ""
    if compiled is not None and compiled["seconds"]:
        step = " / ".join(_seconds(compiled["seconds"][name]) for name in MEASURES if name in compiled["seconds"])
        peak = _gib(compiled["memory_bytes"]) if compiled["memory_bytes"] else ""
        peak += "" if compiled["fits"] else ", does not fit"
    elif compiled is not None:
        step = compiled["kind"]
    seconds = predicted["seconds"]
    return [batch, words, f"`{cell['remat']}`", memory, _seconds(seconds), f"{mfu(cell, seconds):.0%}", step, peak,
            cell["date"]]  # fmt: skip


def _section(target: str, cell: Cell) -> str:
    shown = "\n".join(f"    {line}".rstrip() for line in cell["text"]) if cell["text"] else cell["problem"]
    return f"## {target}\n\n    {cell['command']}\n\n{shown}"


def _recipes(stored: Mapping[str, Any]) -> Iterable[list[str]]:
    for name, row in stored["recipes"].items():
        if row["status"] == "ok":
            sides = row["recipe"], row["plan"]
            yield [name, f"{row['measured']:.2f}", *(text for side in sides for text in _side(side, row["measured"]))]


def _side(side: Cell, measured: float) -> tuple[str, str]:
    if not side["predicted"]:
        return "no plan", ""
    seconds, compiled = side["predicted"]["seconds"], side["compiled"]
    words = f"`{side['words']}`" + (f", {side['microbatches']} microbatches" if side["microbatches"] > 1 else "")
    judged = ""
    if compiled is not None and compiled["seconds"]:
        judged = "; compiled " + " / ".join(
            f"{compiled['seconds'][n]:.2f}" for n in MEASURES if n in compiled["seconds"]
        )
    return f"{words}: {seconds:.2f}{judged}", f"{seconds / measured:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


def _of_limit(value: float, limit: float) -> str:
    return f"{_gib(value)} of {limit / 2**30:.1f}" if limit else _gib(value)
