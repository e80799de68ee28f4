"""Which dimensions of a function's operands are cut together, and how far: the search of `discover`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from autoshard.sharding.discover.piecewise_runs import SAME, Outcome, Part, attempt
from autoshard.sharding.discover.rule_text import Found, Span, fits
from autoshard.sharding.discover.subject import Subject

_FIRST = (2, 3, 5, 7)  # numbers of pieces of a first attempt
_FINEST = 16  # the most pieces that are tried
# How many sets of other operands' places are tried with a place, and how many of those that can be run on pieces: with
# one behind what is taken of its dimension, and with one anywhere in it.
_NEXT, _ANYWHERE = (40, 6), (8, 2)
_FEW = 5  # sets of values, for other numbers of pieces than the first


class Search:
    """Takes the operands' dimensions in order; what of one is cut is taken. Factors stand side by side in it."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.tried: dict[tuple[tuple[Part, ...], int], Outcome] = {}
        self.outcomes: dict[Found, list[Outcome]] = {}
        self.taken: dict[tuple[bool, int, int], list[Span]] = {}  # (of a result, array, dimension)
        self.withdrawn: dict[tuple[Part, ...], str] = {}

    def run(self) -> None:
        """Finds every factor."""
        for i, shape in enumerate(self.subject.shapes):
            for d, size in enumerate(shape):
                while (end := self.end(i, d)) < size and self.next(i, d, end, size):
                    pass

    def next(self, array: int, dim: int, end: int, size: int) -> bool:
        """Finds one more factor of a dimension, behind what is taken of it or, if nothing is, anywhere."""
        if self.find(Part(array, dim, end), size // end, *_NEXT):
            return True
        majors = [m for m in range(2, size) if size % m == 0] if end == 1 else []
        return any(self.find(Part(array, dim, major), size // major, *_ANYWHERE) for major in majors)

    def find(self, part: Part, extent: int, most: int, most_run: int) -> bool:
        """Cuts a place alone, then together with places of other operands, until pieces give the whole."""
        ways = next((n for n in _FIRST if extent % n == 0), None)
        if ways is None:
            return False
        runs = 0
        for companions in itertools.islice(self.companions(part, extent, ways), most):
            outcome = self.attempt((part, *companions), ways)
            if outcome.joins and self.accept(self.least(outcome, part)):
                return True
            runs += outcome.ran
            if runs == most_run:
                break
        return False

    def attempt(self, cut: tuple[Part, ...], ways: int, sets: int | None = None) -> Outcome:
        """What comes of a cut; tried once."""
        key = tuple(sorted(cut)), ways
        if key not in self.tried:
            self.tried[key] = attempt(self.subject, *key, sets)
        return self.tried[key]

    def companions(self, part: Part, extent: int, ways: int) -> Iterator[tuple[Part, ...]]:
        """Places of other operands to cut with one: none, all of its size, some of its size, others that divide."""
        equal, other = self.places(part, extent, ways)
        yield ()
        everywhere = {p.array: p for p in reversed(equal)} | {p.array: p for p in equal if p.dim == part.dim}
        if len(everywhere) > 1:
            yield tuple(everywhere.values())
        yield from _sets(equal, range(1, len(everywhere) + 1))
        yield from (some for some in _sets([*equal, *other], (1, 2)) if not set(some) <= set(equal))

    def places(self, part: Part, extent: int, ways: int) -> tuple[list[Part], list[Part]]:
        """Free places of other operands: as large as one, and of other sizes that are cut as well."""
        equal: list[Part] = []
        other: list[Part] = []
        for i, shape in enumerate(self.subject.shapes):
            for d, size in enumerate(shape):
                end = self.end(i, d)
                rest = size // end
                if i == part.array or rest < 2:
                    continue
                if rest == extent:
                    equal.append(Part(i, d, end))
                elif rest % extent == 0:
                    other.append(Part(i, d, size // extent))
                elif extent % rest == 0 and rest % ways == 0:
                    other.append(Part(i, d, end))
        return equal, other

    def least(self, outcome: Outcome, part: Part) -> Outcome:
        """An outcome without the companions that it does not need."""
        for other in outcome.cut if len(outcome.cut) > 2 else ():
            if other != part:
                fewer = self.attempt(tuple(p for p in outcome.cut if p != other), outcome.ways)
                outcome = fewer if fewer.joins else outcome
        return outcome

    def accept(self, outcome: Outcome) -> bool:
        """Makes an outcome a factor, if it does not stand where another one does."""
        results = tuple(way for way in outcome.joins if isinstance(way, Part))
        places = [(False, p) for p in outcome.cut] + [(True, p) for p in results]
        outcomes, size = self.refined(outcome, math.gcd(*(self.size(*place) // place[1].major for place in places)))
        for of_result, p in places:
            spans = [*self.taken.get((of_result, p.array, p.dim), []), (p.major, size)]
            if not fits(self.size(of_result, p), spans):
                why = "its pieces of results stand where those of another factor do"
                self.withdrawn[outcome.cut] = why
                return False
        for of_result, p in places:
            self.taken.setdefault((of_result, p.array, p.dim), []).append((p.major, size))
        ops: list[Any] = [way for way in outcome.joins if isinstance(way, str) and way != SAME]
        self.outcomes[Found(outcome.cut, results, size, ops[0] if ops else None)] = outcomes
        return True

    def refined(self, outcome: Outcome, largest: int) -> tuple[list[Outcome], int]:
        """The most pieces that a cut can have: its outcomes, and how many."""
        first = outcome.ways
        finer = [n for n in range(min(largest, _FINEST), first, -1) if largest % n == 0 and n % first == 0]
        for ways in finer:
            found = self.attempt(outcome.cut, ways, _FEW)
            if found.joins == outcome.joins:
                return [outcome, found], largest if ways == finer[0] else ways
        return [outcome], largest if not finer else first

    def size(self, of_result: bool, part: Part) -> int:
        """The size of the dimension that a place is in."""
        shape = self.subject.results[part.array].shape if of_result else self.subject.shapes[part.array]
        return shape[part.dim]

    def end(self, array: int, dim: int) -> int:
        """Behind how much of an operand's dimension nothing is taken."""
        return max((major * size for major, size in self.taken.get((False, array, dim), ())), default=1)

    def withdraw(self, found: Found, why: str) -> None:
        """Takes a factor back."""
        outcome = self.outcomes.pop(found)[0]
        self.withdrawn[outcome.cut] = why
        for of_result, parts in ((False, found.operands), (True, found.results)):
            for p in parts:
                self.taken[of_result, p.array, p.dim].remove((p.major, found.size))

    def found(self) -> list[Found]:
        """The factors, and for each dimension of which nothing is taken a whole one."""
        whole: list[Found] = []
        free = [(i, d) for i, shape in enumerate(self.subject.shapes) for d, n in enumerate(shape) if n != 1]
        for i, d in free:
            if not self.taken.get((False, i, d)) and not any(
                p.array == i and p.dim == d for f in whole for p in f.operands
            ):
                whole.append(self.whole(Part(i, d), whole))
        return [*self.outcomes, *whole]

    def whole(self, part: Part, known: list[Found]) -> Found:
        """A whole factor: of dimensions that shrink together, by their shapes, where pieces could be run."""
        size = self.size(False, part)

        def free(of_result: bool, p: Part) -> bool:
            stands = any(p in (f.results if of_result else f.operands) for f in known)
            is_taken = self.taken.get((of_result, p.array, p.dim))
            return p.major == 1 and not stands and not is_taken and self.size(of_result, p) == size

        for outcome in self.tried.values():
            if outcome.ran and part in outcome.cut and all(free(False, p) for p in outcome.cut):
                shrunk = {p.array: p for p in reversed(outcome.shrunk) if free(True, p)}
                return Found(outcome.cut, tuple(shrunk.values()), size, whole=True)
        return Found((part,), (), size, whole=True)

    def refusals(self) -> Iterator[tuple[Part, int, list[tuple[str, str]]]]:
        """Each place of an operand that could not be cut, its dimension's size, and what was tried."""
        for i, shape in enumerate(self.subject.shapes):
            for d, size in enumerate(shape):
                spans = self.taken.get((False, i, d), [])
                if size != 1 and math.prod(count for _, count in spans) < size or not size:
                    end = self.end(i, d)
                    part = Part(i, d, end if end < size else 1)
                    yield part, size, list(self.why(part, size // part.major))

    def why(self, part: Part, extent: int) -> Iterator[tuple[str, str]]:
        """What was cut with a place, and what came of it; first what could be run."""
        if all(extent % n for n in _FIRST):
            yield f"operand {part}", f"{extent} is not cut into 2, 3, 5 or 7 equal pieces"
        outcomes = [o for o in self.tried.values() if part in o.cut and (o.reason or o.cut in self.withdrawn)]
        for o in sorted(outcomes, key=lambda o: not o.ran):
            cut = " and ".join(f"operand {p}" for p in o.cut)
            yield f"{cut} cut into {o.ways}", o.reason or self.withdrawn[o.cut]


def _sets(parts: list[Part], counts: Any) -> Iterator[tuple[Part, ...]]:
    """Sets of so many of these places, of different operands."""
    for count in counts:
        for some in itertools.combinations(parts, count):
            if len({p.array for p in some}) == count:
                yield some
