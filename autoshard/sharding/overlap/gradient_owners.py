"""The parameter to which each gradient belongs, by dataflow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.operator_sharding import is_gradient
from autoshard.sharding.program.operator_kinds import is_decision_point
from autoshard.spmdrules.ir.program import Op


def gradient_owners(axes: LogicalAxes, roles: Roles, state: Sequence[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Return a mapping from each gradient, a result of an operator, to the parameters whose updates use it.

    The search goes back from each updated parameter, through values without the batch, to the operators that sum over
    the batch. A scalar, such as the norm of all gradients, is not followed.

    Args:
        axes: the logical axes of the program.
        roles: the roles of its inputs and values.
        state: pairs (input, output) of its state, or of inputs and results of the same structure.
    """
    made_by: dict[int, Op] = {}
    inner: defaultdict[int, list[int]] = defaultdict(list)  # result of a loop -> the values of its body
    for op in axes.program.ops():
        if not op.blocks:
            made_by.update(dict.fromkeys(op.results, op))
        for edge in op.edges:
            if edge.outer in op.results:
                inner[edge.outer].append(edge.inner)
    found: defaultdict[int, set[int]] = defaultdict(set)
    for source, output in state:
        if roles.inputs.get(source) != "parameter":
            continue
        pending, seen = [output], {output}
        while pending:
            value = pending.pop()
            op = made_by.get(value)
            if op is not None and is_decision_point(op) and is_gradient(axes, roles, op, value):
                found[value].add(source)
                continue
            further = [*inner[value], *(op.operands if op is not None else ())]
            further = [v for v in further if v in roles.gradients and v not in seen]
            seen.update(further)
            pending += further
    return {value: frozenset(owners) for value, owners in found.items()}
