"""The table of a family: which stored tensors each parameter of its model is made of.

A table maps the path of a parameter within the model, or within a layer, to the name and the layout of its tensor. A
model may have several stacks of layers, such as a vision tower and a decoder; each has a prefix.
`{layer}` and `{expert}` in a name stand for the number of the layer and of the expert. The same table serves import and
export, and models whose layers are stacked or separate.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.models.decoder.segments import segments_of
from autoshard.models.pretrained.layouts import Layout

_BLOCK = re.compile(r"(|.*/)blocks/(?:(\d+)/)?(.+)")
_LAYER = re.compile(r"(|.*/)segments/(\d+)/(?:(\d+)/)?layers/(\d+)/(.+)")


@shown
@dataclass(frozen=True)
class Stored:
    """Where the values of a parameter are stored.

    Attributes:
        name: name of the tensor, with `{layer}` and `{expert}`.
        layout: how the tensor becomes the parameter. The dimensions of stacked layers and of experts that are separate
            tensors are not in it.
    """

    name: str
    layout: Layout


Table = Mapping[str, Stored]
Stacks = Mapping[str, Sequence[Hashable]]
"""Prefix of the paths of each stack of layers -> the kind of each layer. A model's only stack has no prefix."""


def stored(name: str, layout: str, part: int = 0, parts: int = 1) -> Stored:
    """Make a row of a table."""
    return Stored(name, Layout(layout, part, parts))


@shown
@dataclass(frozen=True)
class Source:
    """The tensors that a parameter is made of.

    Attributes:
        shape: the parameter's shape.
        names: the names of the tensors, one for each index of the leading dimensions.
        leading: the number of leading dimensions, of stacked layers and of experts.
        layout: how a tensor becomes the other dimensions.
    """

    shape: tuple[int, ...]
    names: Mapping[tuple[int, ...], str]
    leading: int
    layout: Layout

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.layout.tensor_shape(self.shape[self.leading :])


def sources_of(stacks: Stacks, table: Table, shapes: Mapping[str, Sequence[int]]) -> dict[str, Source]:
    """Return the source of each parameter.

    Args:
        stacks: the stacks of layers.
        table: the family's table.
        shapes: path of each parameter -> its shape.

    Raises:
        KeyError: the table has no row for a parameter.
    """
    segments = {prefix: segments_of(kinds) for prefix, kinds in stacks.items()}
    found = {}
    for path, shape in shapes.items():
        within, stacked, layers = path, False, [None]
        if match := _LAYER.fullmatch(path):
            segment, position = segments[match[1]][int(match[2])], int(match[4])
            within, stacked = match[1] + match[5], match[3] is None
            repeats = range(segment.repeats) if stacked else [int(match[3])]
            layers = [segment.layer(repeat, position) for repeat in repeats]
        elif match := _BLOCK.fullmatch(path):
            within, stacked = match[1] + match[3], match[2] is None
            layers = list(range(len(stacks[match[1]]))) if stacked else [int(match[2])]
        row = table[within]
        dims = [layers] if stacked else []
        if "{expert}" in row.name:
            dims.append(list(range(shape[len(dims)])))
        names = {}
        for number, layer in enumerate(layers):
            for expert in dims[-1] if "{expert}" in row.name else [None]:
                index = ((number,) if stacked else ()) + (() if expert is None else (expert,))
                names[index] = row.name.format(layer=layer, expert=expert)
        found[path] = Source(tuple(shape), names, len(dims), row.layout)
    return found
