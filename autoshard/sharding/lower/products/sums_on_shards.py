"""Operators that run under `shard_map`, so that their partial sums are reduced as planned.

XLA would reduce them in other ways:

- Sums of rows of the data, such as those of the edges of each node. XLA:TPU would all-reduce each over all mesh axes at
  once, and then take a slice (libtpu 0.0.42.1, v5e).
- The gradient of a table, if it is summed over several mesh axes and sharded over one of them. XLA:TPU would all-reduce
  it in the same way. If it is summed over a single mesh axis, XLA reduce-scatters it by itself.
- Sums of complex numbers. XLA:TPU would gather the partial sums of all devices, and each device would add them. On
  shards, real and imaginary parts are reduced (`spmdrules.custom_ops.sharded_execution`).
"""

from __future__ import annotations

import jax.numpy as jnp

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.ir.program import Op


def sums_on_shards(layout: Layout, op: Op, chosen: OperatorStrategy) -> bool:
    """Whether an operator runs on shards because of its partial sums.

    Args:
        layout: the layout.
        op: the operator.
        chosen: its strategy.
    """
    sums = [move for move in chosen.moves if move.array < 0 and move.kind in ("reduce-scatter", "all-reduce")]
    if any(jnp.issubdtype(op.eqn.outvars[-1 - move.array].aval.dtype, jnp.complexfloating) for move in sums):
        return True
    if op.name != "scatter-add" or all(move.kind != "reduce-scatter" for move in sums):
        return False
    roles = layout.roles
    if roles.have_rows(layout.axes.of_value[op.results[0]]):
        return bool(roles.other_rows)
    return len({axis for move in sums for axis in move.axes}) > 1
