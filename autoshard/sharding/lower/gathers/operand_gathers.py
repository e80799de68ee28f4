"""Parameters that are gathered before an operator that is not a decision point, such as an elementwise one.

XLA gathers other parameters of such operators by itself.
"""

from __future__ import annotations

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.spmdrules.core.placement import Spec, axes_of
from autoshard.spmdrules.ir.program import Op


def gathered_operands(layout: Layout, op: Op) -> dict[int, Spec]:
    """Return the operands that are gathered before an operator: number of the operand -> its sharding afterwards.

    There are three kinds:

        scales       of a weight that is decoded (`weights.decoded_weights`)
        parameters   that are joined along a dimension in which they are sharded (`weights.joined_weights`)
        broadcasts   such as the scale of a norm, if a mesh axis shards the stored parameter, but not the result.
                     Otherwise XLA may shard the result, and all that is computed from it, over this axis
    """
    if (joined := layout.roles.joined.join_of(op)) is not None:
        result, join = joined
        after = layout.alias_spec(layout.roles.computed_weights[result], result)
        needed = join.needed(lambda v: operand_spec(layout, v), layout.spec, after)
        specs = {i: needed[v] for i, v in enumerate(op.operands) if v in needed}
    elif not layout.roles.decoded_weights.isdisjoint(op.results):
        stored = [i for i, v in enumerate(op.operands) if v in layout.roles.inputs or v in layout.aliased_inputs]
        specs = {i: layout.spec(op.operands[i]) for i in stored}
    else:
        repeated = [i for i, v in enumerate(op.operands) if v in layout.aliased_inputs and _is_repeated(op, i)]
        specs = {i: layout.spec(op.operands[i]) for i in repeated if _may_spread(layout, op, i)}
    return {i: spec for i, spec in specs.items() if spec != operand_spec(layout, op.operands[i])}


def _is_repeated(op: Op, operand: int) -> bool:
    return bool(op.results) and op.eqn.invars[operand].aval.size < op.eqn.outvars[0].aval.size


def _may_spread(layout: Layout, op: Op, operand: int) -> bool:
    """Whether a mesh axis shards the stored operand only, and neither the gathered operand nor the result."""
    stored, needed = operand_spec(layout, op.operands[operand]), layout.spec(op.operands[operand])
    return not set(axes_of(stored)) <= {*axes_of(needed), *axes_of(layout.spec(op.results[0]))}
