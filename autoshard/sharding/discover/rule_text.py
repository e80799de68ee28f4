"""Writes the text of a rule from the factors that were found and their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.discover.piecewise_runs import Place
from autoshard.spmdrules.core.rule import Factor, Reduction, Rule

Span = tuple[int, int]  # in a dimension: the product of the sizes major to a factor, and the factor's size


@shown
@dataclass(frozen=True)
class FoundFactor:
    """A factor without a name.

    Attributes:
        operands: its places in operands.
        results: its places in results.
        size: the most pieces that it can be split into; the number of its elements if it is whole.
        op: the reduction under which results without it are partial; None if they are not partial.
        whole: whether it cannot be split.
    """

    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    size: int
    op: Reduction | None = None
    whole: bool = False


@shown
@dataclass(frozen=True)
class _Gap:
    """A part of a dimension between factors that was not split.

    Attributes:
        array: the number of the operand; -1, -2, ... for results 0, 1, ....
        dim: the dimension.
        major: the product of the sizes that are major to it.
        size: its size.
    """

    array: int
    dim: int
    major: int
    size: int


def fits(size: int, spans: Sequence[Span]) -> bool:
    """Whether a dimension of this size can have these spans: they do not overlap, and their boundaries nest."""
    end = 1
    for major, count in sorted(spans):
        if major % end:
            return False
        end = major * count
    return size % end == 0


def render_rule(
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    found: Sequence[FoundFactor],
    linear: Sequence[tuple[int, ...]] = (),
) -> tuple[str, dict[str, FoundFactor]]:
    """Returns the text of a rule for operands and results of these shapes, and the factor of each name.

    The text states only the sizes that the operands' shapes do not determine.
    """
    sides = (
        [_dims(k, shape, found, False) for k, shape in enumerate(operands)],
        [_dims(k, shape, found, True) for k, shape in enumerate(results)],
    )
    parts = dict.fromkeys(part for side in sides for array in side for dim in array for part in dim)
    names = {part: _letter(k) for k, part in enumerate(parts)}
    ins, outs = (tuple(tuple(tuple(names[p] for p in dim) for dim in array) for array in side) for side in sides)
    rule = Rule(ins, outs, tuple(_factor(names[p], p) for p in parts), tuple(linear))
    sizes = {names[p]: p.size for p in parts}
    gaps = {names[p] for p in parts if isinstance(p, _Gap)}
    stated = " ".join(f"{name}={sizes[name]}" for name in sorted(_unbound_sizes(rule, gaps), key=list(sizes).index))
    text = rule.text + (f"; where {stated}" if stated else "")
    return text, {names[p]: p for p in parts if isinstance(p, FoundFactor)}


def _dims(
    array: int, shape: Sequence[int], found: Sequence[FoundFactor], of_results: bool
) -> list[list[FoundFactor | _Gap]]:
    return [list(_dim(array, d, n, found, of_results)) for d, n in enumerate(shape)]


def _dim(
    array: int, dim: int, size: int, found: Sequence[FoundFactor], of_results: bool
) -> Iterator[FoundFactor | _Gap]:
    """Yields the factors and gaps of a dimension, major to minor."""
    here = [
        (p.major, f)
        for f in found
        for p in (f.results if of_results else f.operands)
        if (p.array, p.dim) == (array, dim)
    ]
    side = -1 - array if of_results else array
    end = 1
    for major, factor in sorted(here, key=lambda pair: pair[0]):
        if major > end:
            yield _Gap(side, dim, end, major // end)
        yield factor
        end = major * factor.size
    if size != end:
        yield _Gap(side, dim, end, size // end)


def _factor(name: str, part: FoundFactor | _Gap) -> Factor:
    if isinstance(part, _Gap) or part.whole:
        return Factor(name, None, "whole")
    return Factor(name, None, "reduce", part.op) if part.op else Factor(name)


def _unbound_sizes(rule: Rule, gaps: set[str]) -> set[str]:
    """The factors whose sizes must be stated. `Rule.bind` gets the others from the operands, from left to right."""
    in_operands = {f for dims in rule.operands for dim in dims for f in dim}
    stated = {f.name for f in rule.factors} - in_operands
    known = set(stated)
    for dim in (dim for dims in rule.operands for dim in dims):
        unknown = sorted((f for f in dim if f not in known), key=lambda f: (f not in gaps, -dim.index(f)))
        stated |= set(unknown[:-1])
        known |= set(dim)
    return stated


def _letter(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number % 26] + (str(number // 26) if number >= 26 else "")
