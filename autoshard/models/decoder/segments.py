"""Groups the layers of a model into segments: a pattern of kinds that repeats.

A model whose layers are all alike is one segment whose pattern has one kind. A model that alternates local and global
attention is one segment whose pattern has two. Layers that are left over at the end form segments of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Segment:
    """Consecutive layers: a pattern, repeated.

    Attributes:
        pattern: the kinds of the layers of one repetition.
        repeats: the number of repetitions.
        first: the number of its first layer.
    """

    pattern: tuple[Any, ...]
    repeats: int
    first: int

    def layer(self, repeat: int, position: int) -> int:
        """Return the number of a layer of the model."""
        return self.first + repeat * len(self.pattern) + position


def segments_of(kinds: Sequence[Hashable]) -> tuple[Segment, ...]:
    """Return the segments of layers of these kinds, in order.

    From each layer on, takes the pattern whose repetitions cover the most layers; of those, the shortest.

    >>> from autoshard.models.decoder.kinds import LayerKind
    >>> local, all_ = LayerKind(window=4), LayerKind()
    >>> [(len(s.pattern), s.repeats) for s in segments_of([local, local, all_] * 4 + [local] * 2)]
    [(3, 4), (1, 2)]
    """
    found: list[Segment] = []
    first, number = 0, {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    numbers = [number[kind] for kind in kinds]  # integers, because comparing kinds is slow
    while first < len(kinds):
        repeats = [1 + same // size for size, same in enumerate(_common_prefixes(numbers[first:]), start=1)]
        size, count = max(
            enumerate(repeats, start=1), key=lambda each: (each[0] * each[1] if each[1] > 1 else 0, -each[0])
        )
        # A pattern of many kinds is worth it only if it repeats. Equal layers in front of it come first.
        found.append(Segment(tuple(kinds[first : first + size]), count, first))
        first += size * count
    return tuple(found)


def _common_prefixes(numbers: Sequence[int]) -> list[int]:
    """Return for each place after the first, and the end, how many numbers from there on equal the first numbers.

    The time is proportional to the length (D. Gusfield, Algorithms on Strings, Trees, and Sequences, section 1.4).

    >>> _common_prefixes([1, 2, 1, 2, 1])
    [0, 3, 0, 1, 0]
    """
    found = [0] * (len(numbers) + 1)
    start = stop = 0  # of the ranges that equal the first numbers, the one that reaches farthest
    for place in range(1, len(numbers)):
        same = min(stop - place, found[place - start]) if place < stop else 0
        while place + same < len(numbers) and numbers[same] == numbers[place + same]:
            same += 1
        found[place] = same
        if place + same > stop:
            start, stop = place, place + same
    return found[1:]
