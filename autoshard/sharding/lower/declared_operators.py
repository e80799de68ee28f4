"""Operators with a declared rule run on shards under `shard_map`: by that rule, or attention on a ring of devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from autoshard.sharding.layout.operator_sharding import sharded_factors
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.custom_ops.operator import run_opaque_on_shards, run_sharded
from autoshard.spmdrules.ir.program import Op


def run_declared(op: Op, chosen: OperatorStrategy, mesh: Any, wants: Sequence[Spec], args: Sequence[Any]) -> list[Any]:
    """Return the results of an operator, with their wanted shardings.

    Args:
        op: the operator.
        chosen: its strategy.
        mesh: the mesh of devices.
        wants: the wanted shardings of its results.
        args: its operands.
    """
    if (ring := chosen.ring) is None:
        specs = [chosen.spec(dims) for dims in chosen.rule(op).operands]
        return run_sharded(op.eqn.params, mesh, specs, wants, *args)
    results, factors = [v.aval for v in op.eqn.outvars], sharded_factors(chosen, mesh.shape)
    return run_opaque_on_shards(ring.rule, partial(ring.form.run, ring.axes), results, mesh, factors, wants, *args)
