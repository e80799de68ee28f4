"""A comparison of a trace with the plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard._units import bytes_text, ratio_text, time_text
from autoshard.train.config.profile_words import Window
from autoshard.train.profile.comparison import COMPUTE, Comparison
from autoshard.train.profile.constants import ROWS_SHOWN


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a comparison.

    Args:
        comparison: What to print.
        console: Where to print it.
    """
    c = comparison
    steps = Window(c.steps[0], c.steps[-1]) if c.steps else "no step"
    console.print(_text(f"trace {c.session}: {steps}, {c.devices} {c.platform} device{'s' * (c.devices != 1)}"))
    console.print(_text(f"plan {c.strategy} for {c.target}; times are of one step on one device"))
    measured = "unknown" if c.step_us is None else f"{time_text(c.step_us)}, {_ratio(c.step_us, c.planned_step_us)}"
    console.print(_text(f"step: planned {time_text(c.planned_step_us)}, measured {measured}"))
    console.print(_kinds(c))
    console.print(_modules(c))
    console.print(_collectives(c))
    for note in c.notes:
        console.print(_text(f"note: {note}"))


def _text(text: str) -> Text:
    return Text(text)


def _ratio(measured: float, predicted: float | None) -> str:
    return "-" if not predicted else ratio_text(measured, predicted)


def _time(us: float | None) -> str:
    return "-" if us is None else time_text(us)


def _table(title: str, columns: Sequence[str], left: int) -> Table:
    """A table whose columns before `left` are left-aligned."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n < left else "right", overflow="fold", no_wrap=n >= left)
    return table


def _kinds(c: Comparison) -> Table:
    columns = ["kind", "runs", "planned", "compiled", "measured", "waiting", "measured / planned"]
    table = _table("\nby kind", columns, 1)
    for row in c.kinds:
        waiting = "" if row.kind == COMPUTE else time_text(row.waiting_us)
        table.add_row(_text(row.kind), f"{row.runs:.0f}", _time(row.planned_us), _time(row.predicted_us),
                      time_text(row.measured_us), waiting, _ratio(row.measured_us, row.planned_us))  # fmt: skip
    return table


def _modules(c: Comparison) -> Table:
    table = _table("\nby module", ["module", "compute", "collectives: compiled", "measured", "ratio"], 1)
    for row in c.modules[:ROWS_SHOWN]:
        table.add_row(_text(row.module or "(no module)"), time_text(row.compute_us), time_text(row.predicted_us),
                      time_text(row.measured_us), _ratio(row.measured_us, row.predicted_us))  # fmt: skip
    _rest(table, len(c.modules), 5)
    return table


def _collectives(c: Comparison) -> Table:
    columns = ["collective", "runs", "bytes", "compiled", "measured", "waiting"]
    table = _table("\ncollectives", columns, 1)
    for row in c.collectives[:ROWS_SHOWN]:
        table.add_row(_text(row.name), f"{row.runs:.0f}", bytes_text(row.step_bytes), time_text(row.predicted_us),
                      time_text(row.measured_us), time_text(row.waiting_us))  # fmt: skip
    _rest(table, len(c.collectives), 6)
    return table


def _rest(table: Table, count: int, columns: int) -> None:
    if count > ROWS_SHOWN:
        table.add_row(f"and {count - ROWS_SHOWN} more, in --json", *[""] * (columns - 1))
