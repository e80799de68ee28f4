"""Computed weights: what a program makes of a parameter before it uses it.

    p["w"].T      p["w"].reshape(d, -1)      1 + p["scale"]      p["g"] * p["v"]      p["w"] + p["a"] @ p["b"]

Each element of such a weight depends on one element of the parameter. If a plan stores the parameter in shards, each
device computes its shard of the weight. Operators that use the weight gather it, as they would gather the parameter. A
parameter, its transposes and its reshapes need one gather. The gradient of a reshaped weight is reduced to shards, too.
Parameters may also be concatenated, stacked, split or sliced (`joined_weights`).

Values that are computed from gradients are not computed weights. They belong to the update of the parameters.

The optimizer's state may have codes of 8 bits, such as quantized moments. They are decoded in shards, and the decoded
values are computed weights, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autoshard.sharding.axes.logical_axes import Leaves, LogicalAxes
from autoshard.sharding.axes.weights.joined_weights import Join, JoinedWeights, join_of, joined_weights
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import decodes, is_decision_point
from autoshard.spmdrules.ir.program import Op, visits

_REARRANGING = ("transpose", "reshape")


def computed_weights(
    axes: LogicalAxes, roles: Mapping[int, str], has_batch: Sequence[bool], gradients: Collection[int]
) -> tuple[dict[int, int], JoinedWeights]:
    """Finds the computed weights.

    Args:
        axes: the program's logical axes.
        roles: the role of each input.
        has_batch: for each value, whether it has the batch axis.
        gradients: values that are computed from values with the batch, but do not have it.

    Returns:
        Computed weight -> the parameter, or the first of several; value that is computed from codes of the
        optimizer's state -> that state. And the joined weights among them.
    """
    avals = axes.program.avals
    moments = {v for v, role in roles.items() if role == "optimizer" and itemsize(avals[v]) == 1}
    parameters = {v for v, role in roles.items() if role == "parameter"}
    stored = parameters | moments
    sources = {v: v for v in stored} | {v: source for v, source in axes.parameter_aliases.items() if source in stored}
    found: dict[int, int] = {}
    joins: dict[int, Join] = {}
    origin: dict[int, int] = {}
    constrained: set[int] = set()  # the lowering keeps casts and joined weights in shards

    def add(value: int, operand: int) -> None:
        found[value] = sources[value] = sources[operand]
        if operand in origin:
            origin[value] = origin[operand]

    def is_weight(value: int) -> bool:
        return value not in sources and not has_batch[value] and value not in gradients

    for op, entering in visits(axes.program.block):
        for tie in op.edges:
            outer, inner = (axes.of_value[v] if v >= 0 else () for v in (tie.outer, tie.inner))
            if entering and tie.outer in found and tie.outer in op.operands and inner == outer[int(tie.stacked) :]:
                add(tie.inner, tie.outer)
            # what a loop keeps of a weight in each iteration, such as for the gradient
            kept = not entering and tie.stacked and tie.inner in constrained and tie.outer in op.results
            if kept and inner == outer[1:] and is_weight(tie.outer):
                add(tie.outer, tie.inner)
        if not entering or op.blocks or op.rule is None:
            continue
        if is_decision_point(op) and sources.get(_codes(op), -1) not in moments:
            continue
        for result in op.results:
            if not is_weight(result):
                continue
            if len(op.results) == 1 and (operand := _source_operand(axes, op, result, sources)) is not None:
                add(result, operand)
                if op.name == "convert_element_type":
                    constrained.add(result)
                continue
            join = join_of(op, result, {v for v in op.operands if sources.get(v) in parameters})
            if join is not None:
                add(result, join.operands[0][0])
                joins[result], origin[result] = join, result
                constrained.add(result)
    return found, joined_weights(axes, joins, origin, sources)


def rearranged_weights(axes: LogicalAxes, computed: Mapping[int, int]) -> dict[int, int]:
    """Finds the computed weights that are transposed or reshaped, and otherwise unchanged.

    Args:
        axes: the program's logical axes.
        computed: the computed weights.

    Returns:
        Such a weight -> the value before that: a parameter, its slice or cast, or another computed weight.
    """
    found: dict[int, int] = {}
    for op in axes.program.ops():
        if op.name in _REARRANGING and op.results[0] in computed:
            found[op.results[0]] = found.get(op.operands[0], op.operands[0])
    return found


def _codes(op: Op) -> int:
    """The operand that an operator may decode: by arithmetic, or as row numbers of a table. -1 if there is none."""
    if op.name == "gather":
        return op.operands[1]
    return op.operands[0] if decodes(op) else -1


def _source_operand(axes: LogicalAxes, op: Op, result: int, sources: Mapping[int, int]) -> int | None:
    """The operand from whose elements a result is computed, if it comes from a parameter; None if there is none."""
    own = axes.of_value[result]
    return next((v for v in op.operands if v in sources and _has_same_axes(own, axes.of_value[v])), None)


def _has_same_axes(own: Leaves, others: Leaves) -> bool:
    """Whether two values have the same logical axes, perhaps in another order or in other dimensions.

    If a value has the same logical axis twice, only their order tells them apart, so it must be the same.

    >>> _has_same_axes(((1,), (2,)), ((2, 1),)), _has_same_axes(((1,), (1,), (2,)), ((2,), (1,), (1,)))
    (True, False)
    """
    flat, classes = [c for dim in own for c in dim], [c for dim in others for c in dim]
    if flat == classes:
        return bool(flat)
    return len({*flat}) == len(flat) and sorted(flat) == sorted(classes)
