"""Gathers the rows of a batch before a reshape splits them, if this lets more devices share the work.

For example, a few-shot loss reshapes the embeddings of 80 rows to 5 classes of 16 rows, and the discriminator of a GAN
compares the rows of 4 groups. Classes and rows of a class are then two logical axes in all values that have the rows,
and only the first one can be sharded as the batch: 8 devices cannot share 5 classes, and only 4 of them share 4 groups.
After the rewrite, the rows are one logical axis. They are gathered before the reshape, and each device computes all of
what follows until the rows are merged again.

Let `s` be the share of the work between the split and the merge, `n` the number of devices, and `m` how many of them
share the work without the rewrite. In units of the time on one device, the step takes `1 / m` without the rewrite, and
`1 / n + s` with it. The rewrite is made if `s < 1 / m - 1 / n` for both the FLOPs and the bytes of the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set

from autoshard import _compat
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.merged.row_order import Dim
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.loops.frames import frames
from autoshard.sharding.loops.loop_collectives import with_program
from autoshard.sharding.program.array_sizes import axis_weight
from autoshard.sharding.program.flops import flops_of
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits, rewritten
from autoshard.spmdrules.core.rule import Dims
from autoshard.spmdrules.families.weight_gathers import gather_rows
from autoshard.spmdrules.ir.program import Op


def with_whole_rows(traced: Traced, axes: LogicalAxes, roles: Roles, devices: int) -> Traced:
    """Rewrite a step so that the rows of its batch are one logical axis, if more devices can then share the work.

    The step is returned unchanged if the rewrite does not pay, or if it was cut into microbatches or stages.

    Args:
        traced: the step.
        axes: its logical axes.
        roles: their roles.
        devices: the number of devices.
    """
    if traced.microbatches > 1 or traced.stages > 1 or not _pays(axes, split := _split_dims(axes, roles), devices):
        return traced
    with _compat.auto_axes():
        inlined = with_program(traced, rewritten(traced.closed))
        found = analyse(inlined)
        axes, split, edits = found.axes, _split_dims(found.axes, found.roles), FrameEdits()
        for block, path in frames(inlined.program.block):
            equations = _compat.open_jaxpr(block.jaxpr).eqns
            positions = {id(eqn): n for n, eqn in enumerate(equations)}
            for op in block.ops:
                if id(op.eqn) in positions and op.rule is not None:
                    _gather(op, axes, split, edits.at(path), positions[id(op.eqn)])
        whole = with_program(traced, rewritten(inlined.closed, edits))
    found = analyse(whole)
    return traced if found.roles.batch is None or _split_dims(found.axes, found.roles) else whole


def _split_dims(axes: LogicalAxes, roles: Roles) -> frozenset[Dim]:
    """Return the dimensions of the data that have the batch as their major part."""
    dims = {dim for v, role in roles.inputs.items() if role == "data" for dim in axes.of_value[v]}
    return frozenset(dim for dim in dims if len(dim) > 1 and dim[0] == roles.batch and axes.stacked.isdisjoint(dim))


def _pays(axes: LogicalAxes, split: Set[Dim], devices: int) -> bool:
    """Whether the time saved by sharing work among more devices exceeds the time of the work that they repeat."""
    if len(split) != 1:
        return False
    (dim,) = split
    few = math.gcd(axes.sizes[dim[0]], devices)
    many = math.gcd(math.prod(axes.sizes[c] for c in dim), devices)
    return _share_apart(axes, dim) < 1 / few - 1 / many


def _share_apart(axes: LogicalAxes, split: Dim) -> float:
    """Return the share of the work in operators on split rows, by FLOPs or by result bytes, whichever is larger."""
    parts = {*split}
    is_apart = {
        leaves: any(dim != split and not parts.isdisjoint(dim) for dim in leaves) for leaves in {*axes.of_value}
    }
    flops, nbytes = [0.0, 0.0], [0.0, 0.0]
    for op in axes.program.ops():
        if op.rule is not None:
            apart = any(is_apart[axes.of_value[v]] for v in (*op.operands, *op.results) if v >= 0)
            results = [axes.program.avals[v] for v in op.results]
            flops[apart] += flops_of(op) * op.trips
            nbytes[apart] += sum(axis_weight(a) for a in results if not _compat.is_extended(a.dtype)) * op.trips
    return max(apart / (whole + apart or 1.0) for whole, apart in (flops, nbytes))


def _gather(op: Op, axes: LogicalAxes, split: Set[Dim], edits: FrameEdits, at: int) -> None:
    """Add the edits that gather the rows before an operator splits them, or after an operator merges them."""
    assert op.rule is not None
    before = edits.before.setdefault(at, [])
    for n, (v, dims) in enumerate(zip(op.operands, op.rule.operands, strict=True)):
        if v >= 0 and (dim := _merged(axes.of_value[v], dims, split)) is not None:
            key = edits.operands[at, n] = ("rows", at, n)
            before.append(Edit((op.eqn.invars[n],), (key,), _gathered(dim), op.eqn))
    if len(op.results) == 1 and (dim := _merged(axes.of_value[op.results[0]], op.rule.results[0], split)) is not None:
        operands = [atom for atom in op.eqn.invars if not isinstance(atom, _compat.Literal)]
        before.append(Edit(tuple(operands), (op.eqn.outvars[0],), _recomputed(op, dim), op.eqn))
        edits.skipped.add(at)


def _merged(leaves: Leaves, dims: Dims, split: Set[Dim]) -> int | None:
    """Return the dimension in which an operator splits rows or merges them; None if it does neither."""
    return next((n for n, dim in enumerate(leaves) if dim in split and len(dims[n]) > 1), None)


def _gathered(dim: int) -> Callable[..., list[object]]:
    return lambda x: [gather_rows(x, dim)]


def _recomputed(op: Op, dim: int) -> Callable[..., list[object]]:
    """Return a function that computes an operator and gathers a dimension of its result."""

    def compute(*arrays: object) -> list[object]:
        given = iter(arrays)
        operands = [atom.val if isinstance(atom, _compat.Literal) else next(given) for atom in op.eqn.invars]
        (result,) = _compat.bind(op.eqn, op.eqn.params, *operands)
        return [gather_rows(result, dim)]

    return compute
