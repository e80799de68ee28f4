"""Computed weights: values that a program computes from one parameter, element by element, before it uses them.

    p["w"].T      p["w"].reshape(d, -1)      1 + p["scale"]      p["g"] * p["v"]      p["w"] + p["a"] @ p["b"]

If a plan stores the parameter in shards, it computes such a weight in the same shards. What uses the weight gathers it,
as it would gather the parameter itself. One gather serves a parameter and its transposes and reshapes. The gradient of
a reshaped weight is reduced to these shards, too.

A value computed from the gradient of a parameter is none: it belongs to the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.ir.program import Op, visits

_REARRANGING = ("transpose", "reshape")


def computed_weights(
    axes: LogicalAxes, parameters: Collection[int], has_batch: Sequence[bool], gradients: Collection[int]
) -> dict[int, int]:
    """Finds the computed weights.

    Args:
        axes: the program's logical axes.
        parameters: the inputs that are parameters.
        has_batch: for each value, whether it has the batch axis.
        gradients: values that are computed from values with the batch, but do not have it.

    Returns:
        Value -> the parameter that has its elements.
    """
    aliases = {v: source for v, source in axes.parameter_aliases.items() if source in parameters}
    sources = {**{v: v for v in parameters}, **aliases}
    found: dict[int, int] = {}
    for op, entering in visits(axes.program.block):
        if not entering:
            continue
        for tie in op.edges:
            own, whole = (axes.of_value[v] if v >= 0 else () for v in (tie.inner, tie.outer))
            if tie.outer in found and tie.outer in op.operands and own == whole[int(tie.stacked) :]:
                found[tie.inner] = sources[tie.inner] = found[tie.outer]
        if op.blocks or op.rule is None or len(op.results) != 1 or is_decision_point(op):
            continue
        (result,) = op.results
        if result in sources or has_batch[result] or result in gradients:
            continue
        if (operand := _operand_with_elements(axes, op, result, sources)) is not None:
            found[result] = sources[result] = sources[operand]
    return found


def rearranged_weights(axes: LogicalAxes, computed: Mapping[int, int]) -> dict[int, int]:
    """Finds the computed weights that only have other dimensions, or another order of them.

    Args:
        axes: the program's logical axes.
        computed: the computed weights.

    Returns:
        Value -> the value that it rearranges: a parameter, its slice or cast, or another computed weight.
    """
    found: dict[int, int] = {}
    for op in axes.program.ops():
        if op.name in _REARRANGING and op.results[0] in computed:
            found[op.results[0]] = found.get(op.operands[0], op.operands[0])
    return found


def _operand_with_elements(axes: LogicalAxes, op: Op, result: int, sources: Mapping[int, int]) -> int | None:
    """The operand that has the elements of a result, and comes from a parameter; None if there is none."""
    return next((v for v in op.operands if v in sources and _has_elements(axes, result, v)), None)


def _has_elements(axes: LogicalAxes, value: int, other: int) -> bool:
    """Whether a value has the elements of another one, perhaps in another order or with other dimensions.

    Where two dimensions have the same logical axis, only their order tells them apart.
    """
    own, others = axes.of_value[value], axes.of_value[other]
    if own == others:
        return bool(any(own))
    classes = Counter(c for dim in own for c in dim)
    return bool(classes) and max(classes.values()) == 1 and classes == Counter(c for dim in others for c in dim)
