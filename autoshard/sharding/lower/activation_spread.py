"""Keeps XLA from sharding activations over more mesh axes than planned, by constraining them to their planned sharding.

A product or a reduction may take only a shard of an activation that the plan keeps whole, for example to compute a
shard of a parameter's gradient. XLA propagates shardings from users to operands. Without a constraint, it would shard
the activation, too, and then the norm, the residual sum and the loop's carry from which it is computed. It would gather
them before each operator that needs them whole. So operands of such products and reductions are constrained to the
planned sharding before they are sliced, and so are the values that loops carry.

Compiled for v5e:4x4 (libtpu 0.0.42.1), ViT-L/16 with `dp:8 tp:2 state` sends 5.5 instead of 9.0 GiB, as planned, and
its step takes 395 instead of 445 ms (the joined estimate of `benchmarks/estimate.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.spmdrules.core.placement import Spec, axes_of
from autoshard.spmdrules.core.reshard_path import reshard_path
from autoshard.spmdrules.ir.program import Op


def operand_path(layout: Layout, value: int, spec: Spec) -> list[Spec]:
    """Return the shardings that an operand is constrained to, one after another; the last is `spec`.

    Args:
        layout: the layout.
        value: the operand.
        spec: the sharding in which the operator takes it.
    """
    if value in layout.aliased_inputs:
        return [spec]
    before = operand_spec(layout, value)
    path = reshard_path(before, spec)
    takes_a_part = not set(axes_of(spec)) <= set(axes_of(before))
    return [before, *path] if takes_a_part and has_rows(layout, value) else path


def reduced_spec(layout: Layout, op: Op, want: Spec) -> Spec | None:
    """Return the sharding to which the operand of a reduction is constrained; None if it needs no constraint.

    It needs one if a mesh axis shards the result, such as the gradient of a norm's scale, but not the operand.

    Args:
        layout: the layout.
        op: the reduction.
        want: the wanted sharding of its result.
    """
    if len(op.operands) != 1 or not has_rows(layout, op.operands[0]):
        return None
    spec = layout.spec(op.operands[0])
    return None if set(axes_of(want)) <= set(axes_of(spec)) else spec


def with_planned_rows(
    layout: Layout, values: Sequence[int], carry: Sequence[Any], constrain: Callable[[Any, Spec], Any]
) -> list[Any]:
    """Return the values that a loop carries, with activations and their gradients constrained to the planned sharding.

    Args:
        layout: the layout.
        values: the numbers of the operands of the loop, from its first carried value on.
        carry: the carried values of an iteration.
        constrain: constrains a value to a sharding.
    """
    each = zip(values, carry, strict=False)
    return [constrain(x, layout.spec(v)) if has_rows(layout, v) else x for v, x in each]


def has_rows(layout: Layout, value: int) -> bool:
    """Whether a value has an axis of rows, as activations and their gradients have. Sums over rows have none."""
    return value >= 0 and any(not layout.roles.rows.isdisjoint(dim) for dim in layout.axes.of_value[value])
