"""Constraints of values that reductions take, such as the sum over rows of the gradient of a norm's scale."""

from __future__ import annotations

from autoshard.sharding.layout.layout import Layout
from autoshard.spmdrules.core.placement import Spec, axes_of
from autoshard.spmdrules.ir.program import Op


def reduced_spec(layout: Layout, op: Op, want: Spec) -> Spec | None:
    """Return the sharding that the operand of a reduction must be constrained to; None if it needs no constraint.

    It needs one if a mesh axis shards the wanted result, such as a gradient, but not the operand. Otherwise XLA may
    shard the operand over this axis, too, and with it all activations from which it is computed.

    Args:
        layout: the layout.
        op: the reduction.
        want: the wanted sharding of its result.
    """
    if len(op.operands) != 1 or op.operands[0] in layout.aliased_inputs:
        return None
    spec = layout.spec(op.operands[0])
    return None if set(axes_of(want)) <= set(axes_of(spec)) else spec
