"""The named operators and their gradients as a table for people, with the rules that are derived for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.spmdrules.catalogue import Operator, catalogue
from autoshard.spmdrules.reference.derive import derive, derive_gradient
from autoshard.spmdrules.reference.derived_rule import Derived

# Operators and gradients whose equations are not run by the tests, with the reason.
UNCHECKED: dict[str, str] = {}


@dataclass(frozen=True)
class OperatorRow:
    """One named operator, or the gradient of one.

    Attributes:
        family: the module of the catalogue that it stands in.
        name: what people call it; a gradient is `<name>_grad`.
        rule: what was derived.
        gradient: the name of its gradient's row, "" where it has none.
        note: what sets it apart, why it has no gradient, why nothing of it can be cut or why it is not checked.
    """

    family: str
    name: str
    rule: Derived
    gradient: str
    note: str

    @property
    def checked(self) -> bool:
        """Whether the tests run every equation of it on shards."""
        return self.name not in UNCHECKED


def operator_table(name: str = "") -> list[OperatorRow]:
    """Named operators of the catalogue, each followed by its gradient.

    The whole of it takes a while: each one is traced and cut in every way.

    Args:
        name: a part of the names or families wanted; "" wants all.

    Example:
        >>> next(row.rule.text for row in operator_table("rms_norm") if row.name == "rms_norm_grad")
        'a b c, c, a b c -> a b c, c; reduce a b; inside c'
    """
    wanted = [k for k, (family, op) in enumerate(_catalogue()) if name in family or name in f"{op.name}_grad"]
    return [row for k in wanted for row in _rows(k)]


def rows_of(name: str) -> tuple[OperatorRow, ...]:
    """The row of the operator with exactly this name, and that of its gradient."""
    return _rows(next(k for k, (_, op) in enumerate(_catalogue()) if op.name == name))


@functools.lru_cache(maxsize=1)
def _catalogue() -> tuple[tuple[str, Operator], ...]:
    return tuple(catalogue())


@functools.cache
def _rows(number: int) -> tuple[OperatorRow, ...]:
    return tuple(operator_rows(*_catalogue()[number]))


def operator_rows(family: str, op: Operator) -> Iterator[OperatorRow]:
    """The row of an operator, and that of its gradient if it has one."""
    gradient = f"{op.name}_grad" if op.wrt else ""
    rule = derive(op.fn, *op.args)
    yield OperatorRow(family, op.name, rule, gradient, _note([op.note], op.name, rule))
    if gradient:
        rule = derive_gradient(op)
        yield OperatorRow(family, gradient, rule, "", _note([], gradient, rule))


def _note(said: Sequence[str], name: str, rule: Derived) -> str:
    notes = [text for text in said if text]
    if not rule.cuttable:
        notes.append(why_nothing(rule))
    if name in UNCHECKED:
        notes.append(f"not checked: {UNCHECKED[name]}")
    return "; ".join(notes)


def why_nothing(rule: Derived) -> str:
    """Why a rule has nothing to cut: the primitives that need each factor whole."""
    needs = [f"{f.name} whole for {', '.join(f.because)}" for f in rule.factors if f.because]
    made = "its results are made whole" if rule.factors else "it has no dimensions"
    return f"nothing to cut: {'; '.join(needs) or made}"
