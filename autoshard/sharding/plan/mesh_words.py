"""A mesh in words. A mesh axis that the planner split, `tp` and `tp_1`, counts as the one that was requested."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from jax.sharding import AbstractMesh


def requested_axes(mesh: AbstractMesh) -> dict[str, dict[str, int]]:
    """The mesh axes as requested -> the axes that they were split into, with their sizes.

    >>> requested_axes(AbstractMesh((2, 2, 2), ("dp", "tp", "tp_1")))
    {'dp': {'dp': 2}, 'tp': {'tp': 2, 'tp_1': 2}}
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return {whole: {axis: sizes[axis] for axis in parts} for whole, parts in _parts(mesh.axis_names).items()}


def requested_names(axes: Iterable[str]) -> list[str]:
    """The names of mesh axes as requested.

    >>> requested_names(["dp", "tp", "tp_1"])
    ['dp', 'tp']
    """
    return [*_parts(axes)]


def _parts(axes: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for axis in axes:
        part = re.fullmatch(r"(.+)_\d+", axis)
        whole = part[1] if part and part[1] in found and part[1] == [*found][-1] else axis
        found.setdefault(whole, []).append(axis)
    return found


def mesh_words(axes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Each mesh axis as it was requested: `tp:4`."""
    return [f"{axis}:{math.prod(parts.values())}" for axis, parts in axes.items()]
