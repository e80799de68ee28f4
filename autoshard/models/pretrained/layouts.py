"""How a stored tensor becomes a parameter, and back: a transposition between grouped dimensions, written as text.

    "(h d) e -> e h d"      a tensor [h * d, e] becomes a parameter [e, h, d]
    "(part f) e -> e f"     of a tensor [parts * f, e], one part becomes a parameter [e, f]

Left are the dimensions of the tensor, right those of the parameter. Each name occurs once on each side. `part` is left
only: several parameters are parts of one tensor. So is `1`, a dimension of size 1.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard._shown import shown

PART, ONE = "part", "1"
Index = tuple[slice, ...]


@shown
@dataclass(frozen=True)
class Layout:
    """The dimensions of a stored tensor, and of the parameter that is made of it, or of one part of it.

    Attributes:
        text: the two sides; see the module.
        part: which part of the tensor the parameter is.
        parts: the number of parts; 1 without `part` in the text.

    >>> Layout("(h d) e -> e h d").tensor_shape((8, 2, 4))
    (8, 8)
    """

    text: str
    part: int = 0
    parts: int = 1

    @cached_property
    def groups(self) -> list[list[str]]:
        """The names of each dimension of the tensor."""
        left = self.text.partition("->")[0]
        return [found[0].split() if found[0] else [found[1]] for found in re.findall(r"\(([^)]*)\)|(\w+)", left)]

    @cached_property
    def names(self) -> list[str]:
        """The names of the parameter's dimensions."""
        return self.text.partition("->")[2].split()

    @cached_property
    def in_order(self) -> bool:
        """True if the tensor has its values in the same order as the parameter, so that nothing is transposed."""
        return [name for group in self.groups for name in group if name not in (PART, ONE)] == self.names

    def tensor_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor of which a parameter of this shape is made."""
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def tensor_index(self, index: Index, shape: Sequence[int]) -> Index:
        """Return the smallest ranges of the tensor that hold a range of the parameter.

        Args:
            index: a range of each dimension of the parameter.
            shape: the parameter's shape.
        """
        sizes = self._sizes(shape)
        ranges = {
            name: (i.start or 0, sizes[name] if i.stop is None else i.stop)
            for name, i in zip(self.names, index, strict=True)
        }
        ranges |= {PART: (self.part, self.part + 1), ONE: (0, 1)}
        found = []
        for group in self.groups:
            start, stop = 0, 1
            for name in group:
                first, end = ranges[name]
                # Of the inner dimensions, only whole ranges stay together when more than one outer index is wanted.
                if stop - start > 1:
                    first, end = 0, sizes[name]
                start, stop = start * sizes[name] + first, (stop - 1) * sizes[name] + end
            found.append(slice(start, stop))
        return tuple(found)

    def parameter(self, tensor: np.ndarray, index: Index, shape: Sequence[int]) -> np.ndarray:
        """Return a range of the parameter, from the range of the tensor that `tensor_index` gives."""
        sizes = self._sizes(shape)
        wanted = dict(zip(self.names, index, strict=True)) | {PART: slice(self.part, self.part + 1), ONE: slice(0, 1)}
        within: dict[str, slice] = {}
        split: list[int] = []
        names: list[str] = []
        for group in self.groups:
            many = False
            for name in group:
                here = wanted[name]
                start, stop = here.start or 0, sizes[name] if here.stop is None else here.stop
                split.append(sizes[name] if many else stop - start)
                within[name] = slice(start, stop) if many else slice(None)
                many = many or stop - start > 1
                names.append(name)
        whole = tensor.reshape(split)[tuple(within[name] for name in names)]
        whole = whole[tuple(0 if name in (PART, ONE) else slice(None) for name in names)]
        names = [name for name in names if name not in (PART, ONE)]
        return whole.transpose([names.index(name) for name in self.names])

    def pieces(self, index: Index, shape: Sequence[int], most: int) -> Iterator[Index]:
        """Divide a range of the parameter into smaller ranges, in the order of the tensor's values.

        A piece is as contiguous in the tensor as its size allows.

        Args:
            index: a range of each dimension of the parameter.
            shape: the parameter's shape.
            most: the largest number of values of a piece; at least 1.
        """
        ranges = {name: i.indices(n)[:2] for name, i, n in zip(self.names, index, shape, strict=True)}
        stored = [name for group in self.groups for name in group if name in ranges]
        steps, room = {}, most
        for name in reversed(stored):
            start, stop = ranges[name]
            steps[name] = max(min(stop - start, room), 1)
            room //= max(stop - start, 1)
        parts = [[slice(n, min(n + steps[m], ranges[m][1])) for n in range(*ranges[m], steps[m])] for m in stored]
        for piece in itertools.product(*parts):
            found = dict(zip(stored, piece, strict=True))
            yield tuple(found[name] for name in self.names)

    def write(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        """Write a parameter into its tensor."""
        sizes = self._sizes(parameter.shape)
        names = [name for group in self.groups for name in group]
        kept = [name for name in names if name not in (PART, ONE)]
        fixed = {PART: self.part, ONE: 0}
        split = tensor.reshape([sizes[name] for name in names])
        split[tuple(fixed.get(name, slice(None)) for name in names)] = parameter.transpose(
            [self.names.index(name) for name in kept]
        )

    def _sizes(self, shape: Sequence[int]) -> dict[str, int]:
        return {**dict(zip(self.names, shape, strict=True)), PART: self.parts, ONE: 1}
