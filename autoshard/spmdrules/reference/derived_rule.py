"""A rule that was derived and not declared, as data and as text.

The kinds of its factors are those of `Rule`, and `inside`: partial terms are reduced inside (a norm's statistics, a
softmax's maximum and sum), nothing else moves, and what has the factor stays cut. `layer_norm` is
``a b c, c, c -> a b c; inside c``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

from autoshard.spmdrules.core.rule import Dims, Factor, Reduction, Rule

DerivedKind = Literal["pass", "offset", "reduce", "index", "inside", "halo", "whole"]
KINDS: tuple[DerivedKind, ...] = get_args(DerivedKind)  # the best first


@dataclass(frozen=True)
class DerivedFactor:
    """What cutting one factor of a function means.

    Attributes:
        name: its letter.
        size: in elements.
        kind: see `derive`.
        partial: for each result the operation that it is partial under, None where it is not.
        inside: the operations that partial terms inside are reduced by.
        because: the primitives that need the factor whole.
    """

    name: str
    size: int
    kind: DerivedKind
    partial: tuple[str | None, ...] = ()
    inside: tuple[str, ...] = ()
    because: tuple[str, ...] = ()

    @property
    def cuttable(self) -> bool:
        """Whether it can be cut without anything being gathered."""
        return self.kind not in ("halo", "whole")

    @property
    def ways(self) -> int:
        """The fewest equal pieces that it can be cut into."""
        return next((n for n in range(2, self.size + 1) if self.size % n == 0), 1)


@dataclass(frozen=True)
class Derived:
    """A derived rule.

    Attributes:
        operands: for each array among the arguments, for each dimension its factors, major to minor.
        results: the same for each result.
        factors: in order of first appearance.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[DerivedFactor, ...]

    @property
    def cuttable(self) -> tuple[DerivedFactor, ...]:
        """The factors that can be cut without anything being gathered."""
        return tuple(f for f in self.factors if f.cuttable)

    @cached_property
    def rule(self) -> Rule:
        """The same as a `Rule`, where what such a rule cannot say (`inside`, unlike partials) is needed whole."""
        return Rule(self.operands, self.results, tuple(map(self._plain, self.factors)))

    @cached_property
    def text(self) -> str:
        """The text form; `Rule.parse` reads it unless something is reduced inside or results are unlike partials."""
        mixed = [f for f in self.factors if f.kind == "reduce" and not self._simple(f)]
        inside = [f for f in self.factors if f.kind == "inside"]
        plain = [Factor(f.name, f.size) if f in (*mixed, *inside) else self._plain(f) for f in self.factors]
        head, where, sizes = Rule(self.operands, self.results, tuple(plain)).text.partition("; where ")
        clauses = {
            "reduce": [f"{f.name}:{op}[{results}]" for f in mixed for op, results in self._terms(f)],
            "inside": [f.name if f.inside == ("sum",) else f"{f.name}:{'+'.join(f.inside)}" for f in inside],
        }
        told = [f"{word} {' '.join(items)}" for word, items in clauses.items() if items]
        return "; ".join([head, *told]) + where + sizes

    def __str__(self) -> str:
        return self.text

    def _plain(self, f: DerivedFactor) -> Factor:
        """What a rule says of a factor."""
        if f.kind == "inside" or not self._simple(f):
            return Factor(f.name, f.size, "whole")
        ops = {op for op in f.partial if op}
        return Factor(f.name, f.size, f.kind, cast(Reduction, ops.pop()) if f.kind == "reduce" else None)

    def _simple(self, f: DerivedFactor) -> bool:
        """Whether all results without a factor are partial in the same way, or none of them is."""
        lacking = [op for op, dims in zip(f.partial, self.results, strict=True) if not has_factor(dims, f.name)]
        return len(set(lacking)) <= 1

    def _terms(self, f: DerivedFactor) -> Iterator[tuple[str, str]]:
        """The operations that results are partial under, each with the numbers of these results."""
        for op in dict.fromkeys(filter(None, f.partial)):
            yield op, " ".join(str(j) for j, other in enumerate(f.partial) if other == op)


def has_factor(dims: Sequence[Sequence[Any]], factor: Any) -> bool:
    """Whether a factor stands in one of an array's dimensions."""
    return any(factor in dim for dim in dims)
