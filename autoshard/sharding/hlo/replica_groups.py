"""Which partitions of a program talk to each other in a collective, and which mesh axes that is.

    replica_groups={{0,1},{2,3}}                     a list
    replica_groups=[2,4]<=[4,2]T(1,0)                rows of 0, 1, 2, ... in another shape, turned
    replica_groups=mesh['a'=4,'b'=2] {'b'}           along axes of a mesh; `'a':(2)2` is the part of size 2 of axis a
                                                     that has 2 before it; `, device_ids=(...)` where not 0, 1, 2, ...
    source_target_pairs={{0,1},{1,0}}                a permute's: from, to

A partition's number is its place in the plan's mesh, row by row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[^}]*\},?)*)\}")
_SENT = re.compile(r'_xla_send_recv_source_target_pairs="\{((?:\{[^}]*\},?)*)\}"')
_ROWS = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\((\[?[\d,]+\]?(?:T\([\d,]+\))?)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


@lru_cache(maxsize=8192)
def groups_of(attributes: str, partitions: int) -> Groups:
    """The groups that a collective's attributes name; of a permute its pairs. All partitions where none are named."""
    if listed := _LIST.search(attributes) or _SENT.search(attributes):
        found = [_ints(group) for group in re.findall(r"\{([^}]*)\}", listed[1])]
        return tuple(map(tuple, found)) or (tuple(range(partitions)),)
    if rows := _ROWS.search(attributes):
        return _tuples(_order(rows[2]).reshape(_ints(rows[1])))
    if mesh := _MESH.search(attributes):
        return _along(mesh[1], mesh[2], mesh[3])
    return (tuple(range(partitions)),)


def _along(axes: str, devices: str | None, chosen: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    parts = [(name, int(before or 0), int(size or 0)) for name, before, size in _AXIS.findall(chosen)]
    shape: list[int] = []
    taken: list[int] = []  # the dimensions of `shape` that a group runs along
    for name, size in sizes.items():
        behind = 1
        for _, before, part in sorted(p for p in parts if p[0] == name):
            before, part = before or 1, part or size
            shape += [before // behind, part]
            taken.append(len(shape) - 1)
            behind = before * part
        shape.append(size // behind)
    order = _order(devices) if devices else np.arange(math.prod(sizes.values()))
    kept = [dim for dim in range(len(shape)) if dim not in taken]
    return _tuples(order.reshape(shape).transpose([*kept, *taken]).reshape(-1, math.prod(shape[dim] for dim in taken)))


def _order(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: 0 to 7 in 4 rows of 2, read by columns; or the numbers themselves."""
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
    """The mesh axes that groups span, each of them whole; of pairs, those along which something is sent.

    Returns:
        Mesh axes in the order of the mesh, none where nothing leaves its device; None if the groups are no mesh axes'.
    """
    return _axes_of(groups, tuple(mesh.items()), pairs)


@lru_cache(maxsize=8192)
def _axes_of(groups: Groups, mesh: Sequence[tuple[str, int]], pairs: bool) -> tuple[str, ...] | None:
    sizes = tuple(size for _, size in mesh)
    if max(map(max, groups)) >= math.prod(sizes):
        return None
    places = [np.stack(np.unravel_index(group, sizes or (1,)), -1) for group in groups]
    varied = [dim for dim in range(len(sizes)) if any(len(set(place[:, dim].tolist())) > 1 for place in places)]
    names = tuple(mesh[dim][0] for dim in varied)
    if pairs or not names:
        return names
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    kept = [dim for dim in range(len(sizes)) if dim not in varied]
    whole = numbers.transpose([*kept, *varied]).reshape(-1, math.prod(sizes[dim] for dim in varied))
    return names if {frozenset(group) for group in groups} == {frozenset(row) for row in whole.tolist()} else None
