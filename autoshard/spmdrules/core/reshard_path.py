"""Splits the change of an array's sharding into steps of one kind of collective each.

XLA's partitioner moves a mesh axis to another dimension by an all-to-all if it is the minor axis of its dimension, and
if no other mesh axis enters or leaves one of the two dimensions. For any other change, it gathers the whole array. One
such change is `(("dp", "tp"), ())` to `((), ("dp",))`. Two steps avoid that: a gather to `(("dp",), ())`, then an
all-to-all. Another such change moves two mesh axes from one dimension to two others. It takes two all-to-alls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.spmdrules.core.placement import Spec


def minor_to(spec: Spec, moved: Sequence[str], gathered: Sequence[str]) -> list[str]:
    """Return the mesh axes that must be gathered first: those that are minor to a moved axis of the same dimension.

    Args:
        spec: the sharding of the array.
        moved: the mesh axes that move to another dimension.
        gathered: the mesh axes that are gathered.

    >>> minor_to((("dp", "tp"), ("ep",)), ["dp"], ["tp", "ep"])
    ['tp']
    """
    behind: set[str] = set()
    for axes in spec:
        first = next((n for n, axis in enumerate(axes) if axis in moved), len(axes))
        behind.update(axes[first:])
    return [axis for axis in gathered if axis in behind]


def moves_axis(before: Spec, after: Spec) -> bool:
    """Whether a mesh axis shards another dimension in one sharding than in the other.

    >>> moves_axis((("dp", "tp"), ()), (("dp",), ("tp",))), moves_axis((("dp", "tp"), ()), (("dp",), ()))
    (True, False)
    """
    dim_of = {axis: d for d, axes in enumerate(after) for axis in axes}
    return any(dim_of.get(axis, d) != d for d, axes in enumerate(before) for axis in axes)


def reshard_path(before: Spec, after: Spec) -> list[Spec]:
    """Return the shardings that an array has one after another.

    Each step takes one kind of collective. A step may have several all-to-alls. Two of them are either between the same
    two dimensions, or have no dimension in common.

    Args:
        before: its sharding.
        after: the wanted sharding. It comes last, and it is the only one if no mesh axis moves.

    >>> reshard_path((("dp", "tp"), ()), (("dp",), ("tp",)))
    [(('dp',), ('tp',))]
    >>> reshard_path((("dp", "tp"), ()), ((), ("dp",)))
    [(('dp',), ()), ((), ('dp',))]
    >>> reshard_path((("dp", "tp"), (), ()), ((), ("dp",), ("tp",)))
    [(('dp',), (), ('tp',)), ((), ('dp',), ('tp',))]
    """
    if not moves_axis(before, after):
        return [after]
    dim_of = {axis: d for d, axes in enumerate(after) for axis in axes}
    now, path, last = [*before], [], ""
    pairs: set[tuple[int, int]] = set()  # the dimensions of the all-to-alls since the last sharding of the path
    while (found := _next_step(now, after, dim_of)) is not None:
        kind, d, count = found
        pair = d, dim_of.get(now[d][-count], d)
        shared = kind == "all-to-all" and any(pair != other and {*pair} & {*other} for other in pairs)
        if (last and kind != last) or shared:
            path.append(tuple(now))
            pairs.clear()
        axes, now[d], last = now[d][-count:], now[d][:-count], kind
        if kind == "all-to-all":
            now[dim_of[axes[0]]] += axes
            pairs.add(pair)
    return [*path, after]


def all_to_alls(before: Spec, after: Spec, moved: Sequence[str]) -> list[tuple[str, ...]]:
    """Group mesh axes that move by their dimensions before and after. One all-to-all moves each group.

    Args:
        before: the sharding of the array.
        after: the wanted sharding.
        moved: the mesh axes that move to another dimension.

    >>> all_to_alls((("dp", "tp"), (), ()), ((), ("dp",), ("tp",)), ["dp", "tp"])
    [('dp',), ('tp',)]
    >>> all_to_alls((("dp", "tp"), ()), ((), ("dp", "tp")), ["dp", "tp"])
    [('dp', 'tp')]
    """
    sides = [{axis: d for d, axes in enumerate(spec) for axis in axes} for spec in (before, after)]
    groups: dict[tuple[int | None, ...], list[str]] = {}
    for axis in moved:
        groups.setdefault(tuple(side.get(axis) for side in sides), []).append(axis)
    return [tuple(axes) for axes in groups.values()]


def _next_step(now: Sequence[tuple[str, ...]], after: Spec, dim_of: Mapping[str, int]) -> tuple[str, int, int] | None:
    """Return the next collective: its kind, a dimension, and the number of its minor mesh axes; None at the end.

    All-to-alls come first, because a gather makes the array larger.
    """
    leaving = [d for d, axes in enumerate(now) if axes != after[d][: len(axes)]]
    for d, count in [(dim, n) for dim in leaving for n in range(1, len(now[dim]) + 1)]:
        axes = now[d][-count:]
        to = dim_of.get(axes[0], d)
        if to != d and (*now[to], *axes) == after[to][: len(now[to]) + count]:
            return "all-to-all", d, count
    return next((("all-gather", d, 1) for d in leaving if now[d][-1] not in dim_of), None)
