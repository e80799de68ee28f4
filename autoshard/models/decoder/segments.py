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
    first, kinds = 0, tuple(kinds)
    while first < len(kinds):
        rest = kinds[first:]
        repeats = {size: _repeats(rest, size) for size in range(1, len(rest) + 1)}
        size = max(repeats, key=lambda size: ((size * repeats[size] if repeats[size] > 1 else 0), -size))
        # A pattern of many kinds is worth it only if it repeats. Equal layers in front of it come first.
        found.append(Segment(rest[:size], repeats[size], first))
        first += size * repeats[size]
    return tuple(found)


def _repeats(kinds: tuple[Hashable, ...], size: int) -> int:
    """Return how often the first `size` kinds occur one after another from the start."""
    count = 1
    while kinds[count * size : (count + 1) * size] == kinds[:size]:
        count += 1
    return count
