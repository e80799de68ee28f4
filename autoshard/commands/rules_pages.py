"""What `autoshard rules` shows, as tables, as JSON and as the page docs/rules.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from autoshard import spmdrules
from autoshard.spmdrules.families import FAMILIES
from autoshard.spmdrules.reference.coverage import NO_RULE, UNRUN
from autoshard.spmdrules.reference.operator_table import OperatorRow, operator_table
from autoshard.spmdrules.reference.rule_table import TableRow

_OWN = {family.__name__.rpartition(".")[2] for family in FAMILIES}
_INTRODUCTION = """# Rules

What is known about each operator: how the sharding of its operands passes through it. This page is what
`autoshard rules --markdown` prints with jax {version}; how to add a rule is in [writing-rules.md](writing-rules.md).

A rule gives each dimension of each operand and result the factors that it is made of, major to minor: `(a b)` is a
dimension made of two, `1` one of size 1, `[]` an array without dimensions. A factor that stands in two places is cut in
both in the same way. What the clauses say of a factor:

| clause | cutting the factor |
|---|---|
| (none) | passes through: results that have it are cut in the same way |
| `reduce k`, `reduce k:max` | results that lack it are partial sums (maxima, ...) until they are reduced |
| `inside k`, `inside k:max+sum` | partial terms are reduced inside the operator; what has the factor stays cut |
| `index k` | the dimension is addressed by values: masked locally, partial sums where the result lacks it |
| `offset k` | the shard needs to know where it starts |
| `halo k` | neighbours exchange borders |
| `whole k` | is not possible: the operator needs the whole dimension |
| `linear 0 1` | operands in which the operator is jointly linear: if they are partial sums, so are the results |
| `moves 0` | operands whose elements are only moved: partials of any kind pass through |
| `where k=4` | sizes of parts of a dimension |

`reduce b:sum[1] b:max[2]` says which results are partial under what. The rules of primitives are declared, each by a
function that sees shapes and parameters, and shown here by an example. Those of named operators and of their gradients
(`layer_norm_grad`: the arguments and the cotangents of the results, to the gradients of the arguments) are derived from
the primitives that they are made of. Where it says *checked*, a rule is checked by execution: each equation is run on
the shards that its rule declares, and the results, put together as it declares, are compared with the whole. So are the
equations of the forward derivatives (`jax.jvp`), which have no rows of their own.
"""


@dataclass(frozen=True)
class Pages:
    """A selection of the rules.

    Attributes:
        primitives: rows of primitives.
        without: primitives that have no rule, and why.
        operators: rows of named operators and gradients.
    """

    primitives: Sequence[TableRow]
    without: dict[str, str]
    operators: Sequence[OperatorRow]

    def __bool__(self) -> bool:
        return bool(self.primitives or self.without or self.operators)

    @property
    def counted(self) -> str:
        """How many named operators, gradients and forward derivatives there are."""
        gradients = sum(row.name.endswith("_grad") for row in self.operators)
        unchecked = sum(not row.checked for row in self.operators)
        checked = f"all but {unchecked} checked" if unchecked else "all checked"
        named = f"{len(self.operators) - gradients} named operators and {gradients} gradients, {checked} by execution"
        return f"{named}, as are the equations of {gradients} forward derivatives"

    def print_tables(self) -> None:
        """Prints the tables to the terminal."""
        from rich.console import Console
        from rich.table import Table

        console = Console(highlight=False, markup=False)
        for header, rows in self._tables():
            table = Table(*header)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        if self.operators:
            console.print(self.counted)

    def to_json(self) -> str:
        """All of it as JSON."""
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
        """The page."""
        parts = [_INTRODUCTION.replace("{version}", version("jax"))]
        if self.primitives:
            rows = [(f"`{r.primitive}`", r.family, _code(r.text), _checked(r), r.note) for r in self.primitives]
            parts.append(f"## Primitives\n\n{len(rows)} primitives.\n\n" + _markdown(_PRIMITIVE, rows))
        if self.without:
            rows = [(f"`{name}`", reason) for name, reason in self.without.items()]
            parts.append("## Primitives without a rule\n\n" + _markdown(_WITHOUT, rows))
        if self.operators:
            parts.append(f"## Named operators\n\n{self.counted}.\n")
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
    """Whether the rule of a primitive is run by tests, and why not."""
    if row.family not in _OWN:
        return "no: not ours"
    return f"no: {UNRUN[row.primitive]}" if row.primitive in UNRUN else "yes"


_PRIMITIVE = ("operator", "family", "rule", "checked", "note")
_WITHOUT = ("no rule", "why, and what happens instead")
_OPERATOR = ("family", "operator", "rule", "checked", "note")


def find(name: str, *, operators: bool = False, everything: bool = False) -> Pages:
    """The rules of what has `name` in its own name or its family's.

    Args:
        name: a part of a name; "" finds all.
        operators: named operators instead of primitives.
        everything: both.
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
