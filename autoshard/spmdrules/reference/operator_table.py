"""The named operators and their gradients as a table for people, with their derived rules."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.spmdrules.catalogue import Operator, catalogue
from autoshard.spmdrules.reference.derive import derive, derive_gradient
from autoshard.spmdrules.reference.derived_rule import Derived

# Operators and gradients whose equations the tests do not run -> the reason.
UNCHECKED: dict[str, str] = {}


@shown
@dataclass(frozen=True)
class OperatorRow:
    """One named operator, or the gradient of one.

    Attributes:
        family: the catalogue module that lists it.
        name: its common name; for a gradient `<name>_grad`.
        rule: its derived rule.
        gradient: the name of its gradient's row, "" if it has none.
        note: what is special about it, and why it has no gradient, cannot be sharded, or is not checked.
    """

    family: str
    name: str
    rule: Derived
    gradient: str
    note: str

    @property
    def checked(self) -> bool:
        """Whether the tests run each of its equations on shards."""
        return self.name not in UNCHECKED


def operator_table(name: str = "") -> list[OperatorRow]:
    """Returns the named operators of the catalogue, each followed by its gradient.

    The full table takes a while, because each operator is traced and each of its factors is tried.

    Args:
        name: selects the operators whose name or family contains it; "" selects all.

    Example:
        >>> next(row.rule.text for row in operator_table("rms_norm") if row.name == "rms_norm_grad")
        'a b c, c, a b c -> a b c, c; reduce a b; inside c'
    """
    matching = [k for k, (family, op) in enumerate(_catalogue()) if name in family or name in f"{op.name}_grad"]
    return [row for k in matching for row in _rows(k)]


def rows_of(name: str) -> tuple[OperatorRow, ...]:
    """Returns the row of the operator with exactly this name, and that of its gradient if it has one."""
    return _rows(next(k for k, (_, op) in enumerate(_catalogue()) if op.name == name))


@functools.lru_cache(maxsize=1)
def _catalogue() -> tuple[tuple[str, Operator], ...]:
    return tuple(catalogue())


@functools.cache
def _rows(number: int) -> tuple[OperatorRow, ...]:
    return tuple(operator_rows(*_catalogue()[number]))


def operator_rows(family: str, op: Operator) -> Iterator[OperatorRow]:
    """Yields the row of an operator, and that of its gradient if it has one."""
    gradient = f"{op.name}_grad" if op.wrt else ""
    rule = derive(op.fn, *op.args)
    yield OperatorRow(family, op.name, rule, gradient, _note([op.note], op.name, rule))
    if gradient:
        rule = derive_gradient(op)
        yield OperatorRow(family, gradient, rule, "", _note([], gradient, rule))


def _note(notes: Sequence[str], name: str, rule: Derived) -> str:
    notes = [note for note in notes if note]
    if not rule.shardable_factors:
        notes.append(why_unshardable(rule))
    if name in UNCHECKED:
        notes.append(f"not checked: {UNCHECKED[name]}")
    return "; ".join(notes)


def why_unshardable(rule: Derived) -> str:
    """Explains why nothing can be sharded by a rule: the primitives that need each factor whole."""
    needs = [f"{', '.join(f.because)} needs factor {f.name} whole" for f in rule.factors if f.because]
    otherwise = "its results are replicated" if rule.factors else "it has no dimensions"
    return f"nothing to shard: {'; '.join(needs) or otherwise}"
