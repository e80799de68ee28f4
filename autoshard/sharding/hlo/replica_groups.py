"""The groups of partitions between which a collective runs, and the mesh axes that they span.

    replica_groups={{0,1},{2,3}}                     a list of groups
    replica_groups=[2,4]<=[4,2]T(1,0)                0, 1, 2, ... in shape 4 x 2, transposed; groups are the rows of the
                                                     result in shape 2 x 4
    replica_groups=mesh['a'=4,'b'=2] {'b'}           along axes of a mesh. `'a':(2)2` is the factor of size 2 of axis a
                                                     that comes after a major factor of size 2. `, device_ids=(...)`
                                                     gives the device order if it is not 0, 1, 2, ...
    source_target_pairs={{0,1},{1,0}}                of a permute: pairs (from, to)

The number of a partition is its row-major position in the plan's mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from autoshard.sharding.hlo.constants import GROUP_CACHE_ENTRIES

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[^}]*\},?)*)\}")
_SENT = re.compile(r'_xla_send_recv_source_target_pairs="\{((?:\{[^}]*\},?)*)\}"')
_ROWS = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((\[?[\d,]+\]?(?:T\([\d,]+\))?)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


@lru_cache(maxsize=GROUP_CACHE_ENTRIES)
def groups_of(attributes: str, partitions: int) -> Groups:
    """Parses the groups (of a permute, the pairs) in an instruction's attributes.

    Args:
        attributes: the text of the attributes.
        partitions: number of partitions of the program. They form one group if the attributes name none.
    """
    if listed := _LIST.search(attributes) or _SENT.search(attributes):
        found = [_ints(group) for group in re.findall(r"\{([^}]*)\}", listed[1])]
        return tuple(map(tuple, found)) or (tuple(range(partitions)),)
    if rows := _ROWS.search(attributes):
        return _tuples(_order(rows[2]).reshape(_ints(rows[1])))
    if mesh := _MESH.search(attributes):
        return _along(mesh[1], mesh[2], mesh[3])
    return (tuple(range(partitions)),)


def _along(axes: str, devices: str | None, chosen: str) -> Groups:
    """The groups along the `chosen` axes, or factors of axes, of a mesh."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    parts = [(name, int(before or 0), int(size or 0)) for name, before, size in _AXIS.findall(chosen)]
    shape: list[int] = []
    along: list[int] = []  # the dimensions of `shape` that a group spans
    for name, size in sizes.items():
        done = 1  # product of the factors of this axis so far
        for _, before, part in sorted(p for p in parts if p[0] == name):
            before, part = before or 1, part or size
            shape += [before // done, part]
            along.append(len(shape) - 1)
            done = before * part
        shape.append(size // done)
    order = _order(devices) if devices else np.arange(math.prod(sizes.values()))
    others = [dim for dim in range(len(shape)) if dim not in along]
    rows = order.reshape(shape).transpose([*others, *along])
    return _tuples(rows.reshape(-1, math.prod(shape[dim] for dim in along)))


def _order(text: str) -> np.ndarray:
    """Parses an order of partitions: `[4,2]T(1,0)` is 0 to 7 in shape 4 x 2, transposed; or a list of numbers."""
    shape = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not shape:
        return np.array(_ints(text))
    sizes = _ints(shape[1])
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return (numbers.transpose(_ints(shape[2])) if shape[2] else numbers).reshape(-1)


def _tuples(rows: np.ndarray) -> Groups:
    return tuple(map(tuple, rows.reshape(-1, rows.shape[-1]).tolist()))


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def axes_of(groups: Groups, mesh: Mapping[str, int], pairs: bool = False) -> tuple[str, ...] | None:
    """The mesh axes that groups span.

    Args:
        groups: groups of partitions, or pairs (from, to).
        mesh: axis -> size.
        pairs: whether the groups are pairs. Their axes are those along which data is sent.

    Returns:
        Axes in the order of the mesh, empty if no data leaves its device. None if the groups do not consist of all
        devices along whole axes.
    """
    return _axes_of(groups, tuple(mesh.items()), pairs)


@lru_cache(maxsize=GROUP_CACHE_ENTRIES)
def _axes_of(groups: Groups, mesh: Sequence[tuple[str, int]], pairs: bool) -> tuple[str, ...] | None:
    sizes = tuple(size for _, size in mesh)
    if max(map(max, groups)) >= math.prod(sizes):
        return None
    coords = [np.stack(np.unravel_index(group, sizes or (1,)), -1) for group in groups]
    spanned = [dim for dim in range(len(sizes)) if any(len(set(c[:, dim].tolist())) > 1 for c in coords)]
    names = tuple(mesh[dim][0] for dim in spanned)
    if pairs or not names:
        return names
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    others = [dim for dim in range(len(sizes)) if dim not in spanned]
    expected = numbers.transpose([*others, *spanned]).reshape(-1, math.prod(sizes[dim] for dim in spanned))
    return names if {frozenset(group) for group in groups} == {frozenset(row) for row in expected.tolist()} else None
