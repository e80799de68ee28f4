"""`autoshard rules`."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.commands.arguments import parser
from autoshard.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """List the rules; see `autoshard rules --help`."""
    options = parser(
        "rules",
        "List what is known about each operator: how the sharding of its operands passes through it.",
        "autoshard rules dot_general",
    )
    options.add_argument("name", nargs="?", help="show only operators and families whose name contains this")
    given = options.parse_args(arguments)
    from rich.console import Console
    from rich.table import Table

    from autoshard import spmdrules

    wanted = given.name or ""
    rows = [row for row in spmdrules.table() if wanted in row.primitive or wanted in row.family]
    if not rows:
        raise ConfigError(f"no operator or family contains {given.name!r}: `autoshard rules` lists them all")
    table = Table("operator", "family", "rule", "note")
    for row in rows:
        table.add_row(row.primitive, row.family, row.text, row.note)
    Console(highlight=False, markup=False).print(table)
    return 0
