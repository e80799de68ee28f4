"""The registered rules as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.spmdrules.core.registry import RuleFn, registered


@shown
@dataclass(frozen=True)
class TableRow:
    """One primitive in the table of rules.

    Attributes:
        primitive: the primitive's name.
        family: the module that defines its rule.
        text: the factor map of an example.
        note: what the primitive does.
    """

    primitive: str
    family: str
    text: str
    note: str


def table() -> list[TableRow]:
    """Returns every registered primitive with an example of its rule, sorted by family and name.

    Example:
        >>> next(row.text for row in table() if row.primitive == "dot_general")
        'b m k, b k n -> b m n; reduce k; linear 0; linear 1'
    """
    return sorted(_rows(), key=lambda row: (row.family, row.primitive))


def _rows() -> Iterator[TableRow]:
    for primitive, fn in registered():
        text, note = _documented(fn)
        yield TableRow(primitive.name, fn.__module__.rpartition(".")[2], text, note)


def _documented(fn: RuleFn) -> tuple[str, str]:
    """Splits the first paragraph of a rule function's docstring, ``map``: sentence, into the map and the sentence."""
    head = " ".join((fn.__doc__ or "").strip().split("\n\n", 1)[0].split())
    _, marked, rest = head.partition("``")
    text, closed, note = rest.partition("``")
    return (text, note.lstrip(": ")) if marked and closed else ("", head)
