"""The text of a rule from the factors that were found and the places where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.sharding.discover.piecewise_runs import Part
from autoshard.spmdrules.core.rule import Factor, Reduction, Rule

Span = tuple[int, int]  # in a dimension: behind so many parts of it, and into so many it is cut


@dataclass(frozen=True)
class Found:
    """A factor without a name.

    Attributes:
        operands: where it stands in operands.
        results: where it stands in results.
        size: into how many pieces it can be cut, or its elements where it is whole.
        op: the reduction under which results that lack it are partial, None where they are not.
        whole: whether it cannot be cut.
    """

    operands: tuple[Part, ...]
    results: tuple[Part, ...]
    size: int
    op: Reduction | None = None
    whole: bool = False


@dataclass(frozen=True)
class _Gap:
    """What stands between factors in a dimension, and was not cut."""

    array: int
    dim: int
    major: int
    size: int


def fits(size: int, spans: Sequence[Span]) -> bool:
    """Whether these spans can stand in one dimension of this size: they do not overlap, their boundaries nest."""
    end = 1
    for major, count in sorted(spans):
        if major % end:
            return False
        end = major * count
    return size % end == 0


def declared(
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    found: Sequence[Found],
    linear: Sequence[tuple[int, ...]] = (),
) -> tuple[str, dict[str, Found]]:
    """A rule's text, for operands and results of these shapes, and the factors that its names stand for.

    Sizes are said only where the operands would leave them open.
    """
    made = [[_dims(k, shape, found, False) for k, shape in enumerate(operands)],
            [_dims(k, shape, found, True) for k, shape in enumerate(results)]]  # fmt: skip
    parts = dict.fromkeys(part for side in made for array in side for dim in array for part in dim)
    names = {part: _letter(k) for k, part in enumerate(parts)}
    ins, outs = (tuple(tuple(tuple(names[p] for p in dim) for dim in array) for array in side) for side in made)
    rule = Rule(ins, outs, tuple(_factor(names[p], p) for p in parts), tuple(linear))
    sizes = {names[p]: p.size for p in parts}
    gaps = {names[p] for p in parts if isinstance(p, _Gap)}
    said = " ".join(f"{name}={sizes[name]}" for name in sorted(_open(rule, gaps), key=list(sizes).index))
    text = rule.text + (f"; where {said}" if said else "")
    return text, {names[p]: p for p in parts if isinstance(p, Found)}


def _dims(array: int, shape: Sequence[int], found: Sequence[Found], of_results: bool) -> list[list[Found | _Gap]]:
    return [list(_dim(array, d, n, found, of_results)) for d, n in enumerate(shape)]


def _dim(array: int, dim: int, size: int, found: Sequence[Found], of_results: bool) -> Iterator[Found | _Gap]:
    """What a dimension is made of, major to minor."""
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


def _factor(name: str, part: Found | _Gap) -> Factor:
    if isinstance(part, _Gap) or part.whole:
        return Factor(name, None, "whole")
    return Factor(name, None, "reduce", part.op) if part.op else Factor(name)


def _open(rule: Rule, gaps: set[str]) -> set[str]:
    """Factors whose sizes have to be said: `Rule.bind` reads the others off the operands, from left to right."""
    in_operands = {f for dims in rule.operands for dim in dims for f in dim}
    said = {f.name for f in rule.factors} - in_operands
    known = set(said)
    for dim in (dim for dims in rule.operands for dim in dims):
        unknown = sorted((f for f in dim if f not in known), key=lambda f: (f not in gaps, -dim.index(f)))
        said |= set(unknown[:-1])
        known |= set(dim)
    return said


def _letter(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number % 26] + (str(number // 26) if number >= 26 else "")
