"""A mesh in words. A mesh axis that the planner split, `tp` and `tp_1`, counts as the one that was requested."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from jax.sharding import AbstractMesh


def requested_axes(mesh: AbstractMesh) -> dict[str, dict[str, int]]:
    """The mesh axes as requested -> the axes that they were split into, with their sizes.

    >>> requested_axes(AbstractMesh((2, 2, 2), ("dp", "tp", "tp_1")))
    {'dp': {'dp': 2}, 'tp': {'tp': 2, 'tp_1': 2}}
    """
    found: dict[str, dict[str, int]] = {}
    for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
        part = re.fullmatch(r"(.+)_\d+", axis)
        whole = part[1] if part and part[1] in found and part[1] == [*found][-1] else axis
        found.setdefault(whole, {})[axis] = size
    return found


def mesh_words(axes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Each mesh axis as it was requested: `tp:4`."""
    return [f"{axis}:{math.prod(parts.values())}" for axis, parts in axes.items()]
