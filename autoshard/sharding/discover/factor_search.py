"""The search of `discover`: which dimensions of operands can be split together, and into how many pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from autoshard.sharding.discover.constants import (
    ANYWHERE_LIMITS,
    FINER_SETS,
    FIRST_PIECE_COUNTS,
    MAX_PIECES,
    NEXT_LIMITS,
)
from autoshard.sharding.discover.piecewise_runs import SAME, Outcome, Place, attempt
from autoshard.sharding.discover.rule_text import FoundFactor, Span, fits
from autoshard.sharding.discover.subject import Subject


class Search:
    """Searches the operands' dimensions in order for factors.

    A dimension may have several factors, major to minor. The places that a factor takes are not searched again.

    Attributes:
        subject: the function.
        tried: the outcome of each attempt, by places and number of pieces.
        outcomes: the outcomes that support each found factor.
        taken: the spans that factors take, by (is a result, array, dimension).
        withdrawn: places that were split together and then given up, and why.
    """

    def __init__(self, subject: Subject):
        self.subject = subject
        self.tried: dict[tuple[tuple[Place, ...], int], Outcome] = {}
        self.outcomes: dict[FoundFactor, list[Outcome]] = {}
        self.taken: dict[tuple[bool, int, int], list[Span]] = {}
        self.withdrawn: dict[tuple[Place, ...], str] = {}

    def run(self) -> None:
        """Finds every factor."""
        for i, shape in enumerate(self.subject.shapes):
            for d, size in enumerate(shape):
                while (end := self.covered(i, d)) < size and self.find_next(i, d, end, size):
                    pass

    def find_next(self, array: int, dim: int, end: int, size: int) -> bool:
        """Finds one more factor of a dimension: after its known factors or, if it has none, at any place."""
        if self.find(Place(array, dim, end), size // end, *NEXT_LIMITS):
            return True
        majors = [m for m in range(2, size) if size % m == 0] if end == 1 else []
        return any(self.find(Place(array, dim, major), size // major, *ANYWHERE_LIMITS) for major in majors)

    def find(self, place: Place, extent: int, max_attempts: int, max_runs: int) -> bool:
        """Splits a place alone, then together with places of other operands, until the pieces give the whole result.

        Args:
            place: the place.
            extent: the number of elements that the place can be split into.
            max_attempts: the most combinations to try.
            max_runs: the search stops after this many combinations that can be run on pieces.
        """
        ways = next((n for n in FIRST_PIECE_COUNTS if extent % n == 0), None)
        if ways is None:
            return False
        runs = 0
        for companions in itertools.islice(self.companions(place, extent, ways), max_attempts):
            outcome = self.attempt((place, *companions), ways)
            if outcome.joins and self.accept(self.minimal(outcome, place)):
                return True
            runs += outcome.ran
            if runs == max_runs:
                break
        return False

    def attempt(self, places: tuple[Place, ...], ways: int, sets: int | None = None) -> Outcome:
        """Returns the outcome of splitting these places together. Each attempt is made once."""
        key = tuple(sorted(places)), ways
        if key not in self.tried:
            self.tried[key] = attempt(self.subject, *key, sets)
        return self.tried[key]

    def companions(self, place: Place, extent: int, ways: int) -> Iterator[tuple[Place, ...]]:
        """Yields places to split with `place`: none, one of its extent in each operand, some of its extent, others."""
        equal, other = self.places(place, extent, ways)
        yield ()
        everywhere = {p.array: p for p in reversed(equal)} | {p.array: p for p in equal if p.dim == place.dim}
        if len(everywhere) > 1:
            yield tuple(everywhere.values())
        yield from _place_sets(equal, range(1, len(everywhere) + 1))
        yield from (some for some in _place_sets([*equal, *other], (1, 2)) if not set(some) <= set(equal))

    def places(self, place: Place, extent: int, ways: int) -> tuple[list[Place], list[Place]]:
        """Returns the free places of other operands: those of the same extent, and others that can be split too."""
        equal: list[Place] = []
        other: list[Place] = []
        for i, shape in enumerate(self.subject.shapes):
            for d, size in enumerate(shape):
                end = self.covered(i, d)
                rest = size // end
                if i == place.array or rest < 2:
                    continue
                if rest == extent:
                    equal.append(Place(i, d, end))
                elif rest % extent == 0:
                    other.append(Place(i, d, size // extent))
                elif extent % rest == 0 and rest % ways == 0:
                    other.append(Place(i, d, end))
        return equal, other

    def minimal(self, outcome: Outcome, place: Place) -> Outcome:
        """Removes from an outcome the companions that it does not need."""
        for other in outcome.places if len(outcome.places) > 2 else ():
            if other != place:
                fewer = self.attempt(tuple(p for p in outcome.places if p != other), outcome.piece_count)
                outcome = fewer if fewer.joins else outcome
        return outcome

    def accept(self, outcome: Outcome) -> bool:
        """Makes a factor from an outcome, unless its places overlap those of another factor. Returns whether it did."""
        results = tuple(way for way in outcome.joins if isinstance(way, Place))
        places = [(False, p) for p in outcome.places] + [(True, p) for p in results]
        outcomes, size = self.refined(outcome, math.gcd(*(self.size(*place) // place[1].major for place in places)))
        for of_result, p in places:
            spans = [*self.taken.get((of_result, p.array, p.dim), []), (p.major, size)]
            if not fits(self.size(of_result, p), spans):
                why = "its pieces of a result overlap those of another factor"
                self.withdrawn[outcome.places] = why
                return False
        for of_result, p in places:
            self.taken.setdefault((of_result, p.array, p.dim), []).append((p.major, size))
        ops: list[Any] = [way for way in outcome.joins if isinstance(way, str) and way != SAME]
        self.outcomes[FoundFactor(outcome.places, results, size, ops[0] if ops else None)] = outcomes
        return True

    def refined(self, outcome: Outcome, largest: int) -> tuple[list[Outcome], int]:
        """Finds the largest number of pieces for an outcome's places. Returns the outcomes and that number."""
        first = outcome.piece_count
        finer = [n for n in range(min(largest, MAX_PIECES), first, -1) if largest % n == 0 and n % first == 0]
        for ways in finer:
            found = self.attempt(outcome.places, ways, FINER_SETS)
            if found.joins == outcome.joins:
                return [outcome, found], largest if ways == finer[0] else ways
        return [outcome], largest if not finer else first

    def size(self, of_result: bool, place: Place) -> int:
        """The size of the dimension of a place."""
        shape = self.subject.results[place.array].shape if of_result else self.subject.shapes[place.array]
        return shape[place.dim]

    def covered(self, array: int, dim: int) -> int:
        """The size of the major part of an operand dimension that its known factors take; 1 if it has no factor."""
        return max((major * size for major, size in self.taken.get((False, array, dim), ())), default=1)

    def withdraw(self, found: FoundFactor, why: str) -> None:
        """Gives up a factor."""
        outcome = self.outcomes.pop(found)[0]
        self.withdrawn[outcome.places] = why
        for of_result, places in ((False, found.operands), (True, found.results)):
            for p in places:
                self.taken[of_result, p.array, p.dim].remove((p.major, found.size))

    def found(self) -> list[FoundFactor]:
        """The factors that were found, and a whole factor for each dimension without one."""
        whole: list[FoundFactor] = []
        free = [(i, d) for i, shape in enumerate(self.subject.shapes) for d, n in enumerate(shape) if n != 1]
        for i, d in free:
            if not self.taken.get((False, i, d)) and not any(
                p.array == i and p.dim == d for f in whole for p in f.operands
            ):
                whole.append(self.whole(Place(i, d), whole))
        return [*self.outcomes, *whole]

    def whole(self, place: Place, known: list[FoundFactor]) -> FoundFactor:
        """A whole factor for a dimension, and for those that were split or shrank with it in a run on pieces."""
        size = self.size(False, place)

        def free(of_result: bool, p: Place) -> bool:
            is_known = any(p in (f.results if of_result else f.operands) for f in known)
            is_taken = self.taken.get((of_result, p.array, p.dim))
            return p.major == 1 and not is_known and not is_taken and self.size(of_result, p) == size

        for outcome in self.tried.values():
            if outcome.ran and place in outcome.places and all(free(False, p) for p in outcome.places):
                shrunk = {p.array: p for p in reversed(outcome.shrunk) if free(True, p)}
                return FoundFactor(outcome.places, tuple(shrunk.values()), size, whole=True)
        return FoundFactor((place,), (), size, whole=True)

    def refusals(self) -> Iterator[tuple[Place, int, list[tuple[str, str]]]]:
        """Yields each place of an operand that could not be split, its dimension's size, and what was tried."""
        for i, shape in enumerate(self.subject.shapes):
            for d, size in enumerate(shape):
                spans = self.taken.get((False, i, d), [])
                if size != 1 and math.prod(count for _, count in spans) < size or not size:
                    end = self.covered(i, d)
                    place = Place(i, d, end if end < size else 1)
                    yield place, size, list(self.reasons(place, size // place.major))

    def reasons(self, place: Place, extent: int) -> Iterator[tuple[str, str]]:
        """Yields each attempt to split a place, and why it failed. Attempts that could be run come first."""
        if all(extent % n for n in FIRST_PIECE_COUNTS):
            yield f"operand {place}", f"{extent} cannot be split into 2, 3, 5 or 7 equal pieces"
        outcomes = [o for o in self.tried.values() if place in o.places and (o.reason or o.places in self.withdrawn)]
        for o in sorted(outcomes, key=lambda o: not o.ran):
            split = " and ".join(f"operand {p}" for p in o.places)
            yield f"{split} split into {o.piece_count}", o.reason or self.withdrawn[o.places]


def _place_sets(places: list[Place], counts: Any) -> Iterator[tuple[Place, ...]]:
    """Yields the combinations of places of different operands, for each number of places in `counts`."""
    for count in counts:
        for some in itertools.combinations(places, count):
            if len({p.array for p in some}) == count:
                yield some
