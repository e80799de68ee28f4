"""Words of `offload=` that select names by a pattern, or layers by a slice.

    word     pattern ["@" [start] ":" [stop] [":" step]]
    pattern  a name, or a glob over names: "blocks.*.residual", "blocks.[0-3].residual"

The slice indexes the values of one name, in the order in which the forward pass computes them. With unrolled layers,
`residual@::2` selects the residual of every second layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoshard._shown import shown
from autoshard._typed import short_repr
from autoshard.errors import PlanError
from autoshard.sharding.offload.words import OPTIMIZER

_AT = "@"
_GLOB = re.compile(r"[*?\[]")
_SLICE = re.compile(r"\[?\s*(-?\d*)\s*:\s*(-?\d*)\s*(?::\s*(-?\d*)\s*)?\]?")


@shown
@dataclass(frozen=True)
class LayerWord:
    """One word.

    Attributes:
        text: the word as it was given.
        pattern: a name or a glob over names.
        layers: which values of a name; None for all.
        also: names that the word selects although the pattern does not match them: the pattern is MaxText's name of
            them.
    """

    text: str
    pattern: str
    layers: slice | None
    also: tuple[str, ...] = ()

    @property
    def is_glob(self) -> bool:
        """Whether the pattern is a glob."""
        return _GLOB.search(self.pattern) is not None

    def names(self, name: str) -> bool:
        """Whether the word selects values of this name."""
        return name == self.pattern or name in self.also or (self.is_glob and fnmatchcase(name, self.pattern))

    def label(self) -> str:
        """The word in a message; for one of MaxText's names with the names here."""
        return f"'{self.text}'" + (f" (MaxText's name of {' and '.join(self.also)})" if self.also else "")

    def covers(self, number: int, count: int) -> bool:
        """Whether the word selects value `number` of the `count` values of one name."""
        return number in self.selects(count)

    def selects(self, count: int) -> range:
        """The numbers of the values that the word selects of the `count` values of one name."""
        return range(count) if self.layers is None else range(count)[self.layers]


def read_layer_word(text: str) -> LayerWord:
    """Read a word.

    Raises:
        PlanError: the text after `@` is not a slice, or the word is `optimizer`, whose state has no layers.

    >>> word = read_layer_word("residual@::2")
    >>> [number for number in range(6) if word.covers(number, 6)]
    [0, 2, 4]
    """
    pattern, at, written = (part.strip() for part in text.partition(_AT))
    if not at:
        return LayerWord(text, pattern, None)
    if pattern == OPTIMIZER:
        raise PlanError(
            f"offload has {short_repr(text)}, but the optimizer's state is not counted in layers: it moves as a whole. "
            f"Write '{OPTIMIZER}'"
        )
    return LayerWord(text, pattern, read_slice(text, written))


def read_slice(text: str, written: str) -> slice:
    """Read the slice of a word, in brackets or without.

    Raises:
        PlanError: it is not a slice.
    """
    match = _SLICE.fullmatch(written)
    start, stop, step = ((int(part) if part else None) for part in match.groups()) if match else (None, None, 0)
    if step == 0 or not text.partition(_AT)[0].strip():
        raise PlanError(
            f"offload has {short_repr(text)}; write a name and a slice over layers, such as 'residual@::2' for every "
            "second layer, 'residual@:16' for the first 16, or 'residual@3:4' for number 3 alone, counted from 0"
        )
    return slice(start, stop, step)
