"""Stored operands that are gathered before an operator that is no decision point, such as an elementwise one.

XLA gathers other operands of such operators where it needs them.
"""

from __future__ import annotations

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


def gathered_operands(layout: Layout, op: Op) -> dict[int, Spec]:
    """Return the numbers of these operands, and the shardings in which they are used.

    They are scales from which a weight is decoded (`weights.decoded_weights`), and parameters whose elements are
    repeated, such as the scales of a norm, where no dimension of the result is sharded over the mesh axes that store
    them. There XLA could as well shard the result like the parameter, and all that is computed from it.
    """
    decodes = not layout.roles.decoded_weights.isdisjoint(op.results)
    found: dict[int, Spec] = {}
    for i, v in enumerate(op.operands):
        if v in layout.aliased_inputs or (decodes and v in layout.roles.inputs):
            stored, spec = operand_spec(layout, v), layout.spec(v)
            if stored != spec and (decodes or _is_repeated(op, i) and not _shares_axes(layout, op, stored)):
                found[i] = spec
    return found


def _is_repeated(op: Op, operand: int) -> bool:
    return bool(op.results) and op.eqn.invars[operand].aval.size < op.eqn.outvars[0].aval.size


def _shares_axes(layout: Layout, op: Op, stored: Spec) -> bool:
    """Whether a dimension of the result is sharded over a mesh axis of the operand's stored sharding."""
    of_result = {axis for dim in layout.spec(op.results[0]) for axis in dim}
    return not of_result.isdisjoint(axis for dim in stored for axis in dim)
