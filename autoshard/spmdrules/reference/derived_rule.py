"""A derived (not declared) rule, as data and as text.

Its factors have the kinds of `Rule`, and one more, `inside`: partial terms are reduced inside (the statistics of a
norm, the maximum and sum of a softmax), nothing else moves, and arrays that have the factor stay sharded. `layer_norm`
is ``a b c, c, c -> a b c; inside c``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

from autoshard._shown import shown
from autoshard.spmdrules.core.rule import Dims, Factor, Reduction, Rule

DerivedKind = Literal["pass", "offset", "reduce", "index", "inside", "halo", "whole"]
KINDS: tuple[DerivedKind, ...] = get_args(DerivedKind)  # best first


@shown
@dataclass(frozen=True)
class DerivedFactor:
    """What sharding one factor of a function means.

    Attributes:
        name: its name in the rule's text.
        size: its size in elements.
        kind: see `derive`.
        partial: for each result, the operation that it is partial under, None if it is not partial.
        inside: the operations by which partial terms are reduced inside.
        because: the primitives that need the factor whole.
    """

    name: str
    size: int
    kind: DerivedKind
    partial: tuple[str | None, ...] = ()
    inside: tuple[str, ...] = ()
    because: tuple[str, ...] = ()

    @property
    def shardable(self) -> bool:
        """Whether it can be sharded without gathering anything."""
        return self.kind not in ("halo", "whole")

    @property
    def fewest_shards(self) -> int:
        """The smallest number (above 1) of equal shards that it can be split into; 1 if there is none."""
        return next((n for n in range(2, self.size + 1) if self.size % n == 0), 1)


@shown
@dataclass(frozen=True)
class Derived:
    """A derived rule.

    Attributes:
        operands: the factors of each dimension of each array among the arguments, major to minor.
        results: the same for each result.
        factors: the factors in order of first appearance.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[DerivedFactor, ...]

    @property
    def shardable_factors(self) -> tuple[DerivedFactor, ...]:
        """The factors that can be sharded without gathering anything."""
        return tuple(f for f in self.factors if f.shardable)

    @cached_property
    def rule(self) -> Rule:
        """This rule as a `Rule`; factors that a `Rule` cannot express are whole (see `text`)."""
        return Rule(self.operands, self.results, tuple(map(self._as_rule_factor, self.factors)))

    @cached_property
    def text(self) -> str:
        """The text form. `Rule.parse` reads it, unless a factor is `inside` or has two reductions."""
        mixed = [f for f in self.factors if f.kind == "reduce" and not self._has_one_reduction(f)]
        inside = [f for f in self.factors if f.kind == "inside"]
        plain = [Factor(f.name, f.size) if f in (*mixed, *inside) else self._as_rule_factor(f) for f in self.factors]
        head, where, sizes = Rule(self.operands, self.results, tuple(plain)).text.partition("; where ")
        clauses = {
            "reduce": [f"{f.name}:{op}[{results}]" for f in mixed for op, results in self._reductions(f)],
            "inside": [f.name if f.inside == ("sum",) else f"{f.name}:{'+'.join(f.inside)}" for f in inside],
        }
        extra = [f"{word} {' '.join(items)}" for word, items in clauses.items() if items]
        return "; ".join([head, *extra]) + where + sizes

    def __str__(self) -> str:
        return self.text

    def _as_rule_factor(self, f: DerivedFactor) -> Factor:
        """Converts a derived factor to a factor of a plain `Rule`."""
        if f.kind == "inside" or not self._has_one_reduction(f):
            return Factor(f.name, f.size, "whole")
        ops = {op for op in f.partial if op}
        return Factor(f.name, f.size, f.kind, cast(Reduction, ops.pop()) if f.kind == "reduce" else None)

    def _has_one_reduction(self, f: DerivedFactor) -> bool:
        """Whether the results that lack a factor are all partial under the same operation, or all not partial."""
        lacking = [op for op, dims in zip(f.partial, self.results, strict=True) if not has_factor(dims, f.name)]
        return len(set(lacking)) <= 1

    def _reductions(self, f: DerivedFactor) -> Iterator[tuple[str, str]]:
        """Yields each operation that results are partial under, with the numbers of these results."""
        for op in dict.fromkeys(filter(None, f.partial)):
            yield op, " ".join(str(j) for j, other in enumerate(f.partial) if other == op)


def has_factor(dims: Sequence[Sequence[Any]], factor: Any) -> bool:
    """Whether one of an array's dimensions has a factor."""
    return any(factor in dim for dim in dims)
