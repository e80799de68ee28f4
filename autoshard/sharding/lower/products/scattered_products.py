"""Rewrites products so that XLA reduce-scatters their partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import extends_computed_spec
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.lower.products.conv_as_matmul import add_window_dims, drop_window_dims, is_matmul, matmul
from autoshard.sharding.lower.products.lane_shards import columns_first, is_lane_sharded
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Op


def scattered_product(
    layout: Layout, op: Op, args: Sequence[Any], chosen: OperatorStrategy, want: Spec,
    constrain: Callable[[Any, Spec], Any],
) -> Any:  # fmt: skip
    """Return the result of a rewritten product; None for an operator that is not rewritten.

    Args:
        layout: the layout.
        op: the operator.
        args: its operands.
        chosen: its strategy.
        want: the sharding of its result.
        constrain: constrains a value to a sharding.
    """
    rule = op.rule
    assert rule is not None
    computed = chosen.spec(rule.results[0])
    if is_matmul(op) and want != computed:
        product = matmul(op, *args)
        if not extends_computed_spec(rule, rule.results[0], computed, want):
            product = constrain(product, drop_window_dims(op, computed))
        return add_window_dims(op, constrain(product, drop_window_dims(op, want)))
    is_scattered = any(move.kind == "reduce-scatter" and move.array < 0 for move in chosen.moves)
    if not is_scattered or not is_lane_sharded(op, computed, want, layout.mesh):
        return None
    return columns_first(op, args, want, constrain)
