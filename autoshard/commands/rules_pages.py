"""The output of `autoshard rules`: tables, JSON, and the page docs/rules.md."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from autoshard import spmdrules
from autoshard._shown import shown
from autoshard.spmdrules.families import FAMILIES
from autoshard.spmdrules.reference.coverage import NO_RULE, UNRUN
from autoshard.spmdrules.reference.operator_table import OperatorRow, operator_table
from autoshard.spmdrules.reference.rule_table import TableRow

_OUR_FAMILIES = {family.__name__.rpartition(".")[2] for family in FAMILIES}
_INTRODUCTION = """# Rules

The sharding rule of each operator: how the sharding of its operands determines that of its results. This page is the
output of `autoshard rules --markdown` with jax {version}. [writing-rules.md](writing-rules.md) shows how to add a rule.

A rule gives the factors of each dimension of each operand and result, from major to minor. `(a b)` is a dimension with
two factors, `1` is a dimension of size 1, and `[]` is an array without dimensions. A factor that occurs more than once
is sharded in the same way everywhere. The clauses say what happens when a factor is sharded:

| clause | when the factor is sharded |
|---|---|
| (none) | it passes through: results that have it are sharded in the same way |
| `reduce k`, `reduce k:max` | results without it are partial sums (maxima, ...) until they are reduced |
| `inside k`, `inside k:max+sum` | partial terms are reduced inside the operator; arrays with the factor stay sharded |
| `index k` | addressed by values: each shard masks what it does not hold; results without `k` are partial sums |
| `offset k` | each shard needs its start position |
| `halo k` | neighbouring shards exchange their borders |
| `whole k` | not possible: the operator needs the whole dimension |
| `linear 0 1` | (operands) the operator is jointly linear in them: if they are partial sums, so are the results |
| `moves 0` | (operands) their elements are only moved: partials of every operation pass through |
| `where k=4` | (sizes) the sizes of factors of a dimension |

`reduce b:sum[1] b:max[2]` gives the reduction for each result by number. Rules of primitives are declared: a function
of the shapes and parameters makes the rule, and each row shows an example. Rules of named operators and of their
gradients are derived from their primitives. The gradient `layer_norm_grad` maps the arguments and the cotangents of
the results to the gradients of the arguments. *Checked* rules are tested by execution: each equation runs on the shards
that its rule declares, and the results, combined as the rule declares, are compared with the unsharded operator. The
equations of the forward derivatives (`jax.jvp`) are checked too, but have no rows.
"""


@shown
@dataclass(frozen=True)
class Pages:
    """A selection of the rules.

    Attributes:
        primitives: rows of primitives.
        without: primitive without a rule -> the reason.
        operators: rows of named operators and their gradients.
    """

    primitives: Sequence[TableRow]
    without: dict[str, str]
    operators: Sequence[OperatorRow]

    def __bool__(self) -> bool:
        return bool(self.primitives or self.without or self.operators)

    @property
    def summary(self) -> str:
        """The number of named operators, gradients and forward derivatives."""
        gradients = sum(row.name.endswith("_grad") for row in self.operators)
        unchecked = sum(not row.checked for row in self.operators)
        checked = f"all but {unchecked} checked" if unchecked else "all checked"
        named = f"{len(self.operators) - gradients} named operators and {gradients} gradients, {checked} by execution"
        return f"{named}, and so are the equations of {gradients} forward derivatives"

    def print_tables(self) -> None:
        """Print the tables to the terminal."""
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False, markup=False)
        for header, rows in self._tables():
            table = Table(*header)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        if self.operators:
            console.print(self.summary)

    def to_json(self) -> str:
        """Return the selection as JSON."""
        found: dict[str, Any] = {}
        if self.primitives or self.without:
            found["primitives"] = [
                {
                    "name": r.primitive,
                    "family": r.family,
                    "rule": r.text,
                    "note": r.note,
                    "checked": _checked(r) == "yes",
                }
                for r in self.primitives
            ]
            found["no_rule"] = [{"name": name, "reason": reason} for name, reason in self.without.items()]
        if self.operators:
            found["operators"] = [_as_data(row) for row in self.operators]
        return json.dumps(found, indent=1)

    def to_markdown(self) -> str:
        """Return the selection as a Markdown page."""
        parts = [_INTRODUCTION.replace("{version}", version("jax"))]
        if self.primitives:
            rows = [(f"`{r.primitive}`", r.family, _code(r.text), _checked(r), r.note) for r in self.primitives]
            parts.append(f"## Primitives\n\n{len(rows)} primitives.\n\n" + _markdown(_PRIMITIVE, rows))
        if self.without:
            rows = [(f"`{name}`", reason) for name, reason in self.without.items()]
            parts.append("## Primitives without a rule\n\n" + _markdown(_WITHOUT, rows))
        if self.operators:
            parts.append(f"## Named operators\n\n{self.summary}.\n")
        for family, group in itertools.groupby(self.operators, key=lambda row: row.family):
            rows = [(f"`{r.name}`", _code(r.rule.text), _yes(r.checked), r.note) for r in group]
            parts.append(f"### {family}\n\n" + _markdown(_OPERATOR[1:], rows))
        return "\n".join(parts)

    def _tables(self) -> Iterator[tuple[Sequence[str], list[tuple[str, ...]]]]:
        if self.primitives:
            yield _PRIMITIVE, [(r.primitive, r.family, r.text, _checked(r), r.note) for r in self.primitives]
        if self.without:
            yield _WITHOUT, list(self.without.items())
        if self.operators:
            rows = [(r.family, r.name, r.rule.text, _yes(r.checked), r.note) for r in self.operators]
            yield _OPERATOR, rows


def _checked(row: TableRow) -> str:
    """`yes` if tests check the primitive's rule by execution, else `no` with the reason."""
    if row.family not in _OUR_FAMILIES:
        return "no: not part of autoshard"
    return f"no: {UNRUN[row.primitive]}" if row.primitive in UNRUN else "yes"


_PRIMITIVE = ("operator", "family", "rule", "checked", "note")
_WITHOUT = ("no rule", "why, and what happens instead")
_OPERATOR = ("family", "operator", "rule", "checked", "note")


def find(name: str, *, operators: bool = False, everything: bool = False) -> Pages:
    """Find the rules of the operators whose name, or whose family's name, contains `name`.

    Args:
        name: part of a name; "" matches all.
        operators: find named operators instead of primitives.
        everything: find both.
    """
    primitives: list[TableRow] = []
    without: dict[str, str] = {}
    named: list[OperatorRow] = []
    if not operators:
        primitives = [row for row in spmdrules.table() if name in row.primitive or name in row.family]
        without = {primitive: reason for primitive, reason in sorted(NO_RULE.items()) if name in primitive}
    if operators or everything:
        named = operator_table(name)
    return Pages(primitives, without, named)


def similar(name: str) -> list[str]:
    """The primitives whose names are most like `name`, at most two."""
    return difflib.get_close_matches(name, sorted({row.primitive for row in spmdrules.table()}), n=2)


def _as_data(row: OperatorRow) -> dict[str, Any]:
    factors = [
        {"name": f.name, "size": f.size, "kind": f.kind, "partial": list(f.partial), "inside": list(f.inside),
         "because": list(f.because)}
        for f in row.rule.factors
    ]  # fmt: skip
    return {"family": row.family, "name": row.name, "rule": row.rule.text, "factors": factors,
            "gradient": row.gradient or None, "checked": row.checked, "note": row.note}  # fmt: skip


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _yes(value: bool) -> str:
    return "yes" if value else "no"
