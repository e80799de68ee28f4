"""Shardings of updates in which each device has whole matrices (`families.stacked.matrices`).

All mesh axes shard a stack along its matrices, so the products of an update take nothing from other devices. Before and
after the update, each matrix is sharded like the state that it updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.families.stacked.matrices import collect_p, spread_p
from autoshard.spmdrules.ir.program import Op


@shown
@dataclass(frozen=True)
class SpreadMatrices:
    """The matrices of the updates of a program.

    Attributes:
        counts: the logical axes that count the matrices of a stack.
        sources: value -> the input that is sharded like it: for the operands of each `spread_matrices`, and for the
            results of each `collect_matrices`.
    """

    counts: frozenset[int]
    sources: Mapping[int, int]


_NONE = SpreadMatrices(frozenset(), {})
_known: WeakKeyDictionary[LogicalAxes, SpreadMatrices] = WeakKeyDictionary()


def spread_matrices_of(axes: LogicalAxes) -> SpreadMatrices:
    """Return the matrices of the updates of a program."""
    if axes not in _known:
        ops = [*axes.program.ops()]
        spread = {axes.of_value[op.results[0]][0]: op for op in ops if op.name == spread_p.name}
        _known[axes] = _found(axes, ops, spread) if spread else _NONE
    return _known[axes]


def _found(axes: LogicalAxes, ops: list[Op], spread: Mapping[tuple[int, ...], Op]) -> SpreadMatrices:
    maker = {v: op for op in ops for v in op.results}
    inputs = frozenset(axes.program.inputs)
    sources: dict[int, int] = {}
    for op in spread.values():
        for v in op.operands:
            source = _source(axes, v, maker, inputs)
            if source is not None:
                sources[v] = source
    for op in ops:
        if op.name == collect_p.name:
            first = spread[axes.of_value[op.operands[0]][0]]
            sources |= {v: sources[u] for v, u in zip(op.results, first.operands, strict=True) if u in sources}
    return SpreadMatrices(frozenset(c for dim in spread for c in dim), sources)


def _source(axes: LogicalAxes, value: int, maker: Mapping[int, Op], inputs: frozenset[int]) -> int | None:
    """Return the input from which elementwise operators compute a value of the same size; None if there is none."""
    avals = axes.program.avals
    left, seen = [value], {value}
    while left:
        v = left.pop(0)
        if v in inputs:
            return v
        op = maker.get(v)
        for u in op.operands if op is not None and op.rule is not None and not is_decision_point(op) else ():
            if u >= 0 and u not in seen and avals[u].size == avals[v].size and nbytes(avals[u]):
                seen.add(u)
                left.append(u)
    return None


def spread_spec(
    axes: LogicalAxes, leaves: Leaves, mesh: Mapping[str, int], storage: Mapping[Any, Sequence[str]]
) -> Spec | None:
    """Return the sharding of a value of a stack of matrices; None for other values.

    Mesh axes that store weights come last, so that XLA exchanges shards over them alone.

    Args:
        axes: the logical axes of the program.
        leaves: the logical axes of the value's dimensions.
        mesh: mesh axis -> size.
        storage: role -> the mesh axes over which it is stored.
    """
    counts = spread_matrices_of(axes).counts
    at = next((n for n, dim in enumerate(leaves) if dim and dim[0] in counts), None) if counts else None
    if at is None:
        return None
    stores = {axis for each in storage.values() for axis in each}
    over, left = list[str](), axes.sizes[leaves[at][0]]
    for axis in sorted(mesh, key=stores.__contains__):
        if mesh[axis] > 1 and left % mesh[axis] == 0:
            over.append(axis)
            left //= mesh[axis]
    return tuple(tuple(over) if n == at else () for n in range(len(leaves)))


def within_matrices(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> Spec:
    """Return the sharding of a stack `[L, ...]` after the mesh axes of its first dimension move to other dimensions.

    Devices then exchange shards of each matrix. If the first dimension is sharded, as that of experts may be, XLA
    gathers the stacks before it joins them.

    Example:
        >>> within_matrices((("ep",), (), ("tp",)), (8, 64, 64), {"ep": 8, "tp": 2})
        ((), ('ep',), ('tp',))
    """
    inside = [*map(list, spec[1:])]
    left = [size // prod(mesh[a] for a in over) for size, over in zip(shape[1:], inside, strict=True)]
    for axis in spec[0]:
        at = max(range(len(left)), key=lambda n, axis=axis: left[n] if left[n] % mesh[axis] == 0 else 0)
        if left[at] % mesh[axis] == 0:
            inside[at].append(axis)
            left[at] //= mesh[axis]
    return ((), *map(tuple, inside))
