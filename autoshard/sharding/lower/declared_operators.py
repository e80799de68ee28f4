"""Operators with a declared rule run on shards under `shard_map`: by that rule, or by that of another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from autoshard.sharding.layout.operator_sharding import sharded_factors
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.core.placement import Spec, axes_of, shard_count
from autoshard.spmdrules.custom_ops.operator import run_opaque_on_shards, run_sharded
from autoshard.spmdrules.ir.program import Op


def run_declared(
    op: Op,
    chosen: OperatorStrategy,
    mesh: Any,
    stored: Sequence[Spec],
    wants: Sequence[Spec],
    args: Sequence[Any],
    constrain: Callable[[Any, Spec], Any],
) -> list[Any]:
    """Return the results of an operator, with their wanted shardings.

    Args:
        op: the operator.
        chosen: its strategy.
        mesh: the mesh of devices.
        stored: the shardings of its operands; empty for a literal.
        wants: the wanted shardings of its results.
        args: its operands.
        constrain: returns an array constrained to a sharding.
    """
    args = [
        x if (spec := between(now, chosen.spec(dims), x.shape, mesh.shape)) is None else constrain(x, spec)
        for x, now, dims in zip(args, stored, chosen.rule(op).operands, strict=True)
    ]
    if (form := chosen.form) is None:
        specs = [chosen.spec(dims) for dims in chosen.rule(op).operands]
        return run_sharded(op.eqn.params, mesh, specs, wants, *args)
    results, factors = [v.aval for v in op.eqn.outvars], sharded_factors(chosen, mesh.shape)
    return run_opaque_on_shards(form.rule, partial(form.form.run, form.axes), results, mesh, factors, wants, *args)


def between(now: Spec, goal: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> Spec | None:
    """Return the sharding after the all-to-alls and before the gathers, where an operand needs both.

    XLA's partitioner does both in one step by gathering the whole operand.

    >>> between((("a", "b"), ()), ((), ("b",)), (8, 8), {"a": 2, "b": 2})
    (('a',), ('b',))
    """
    kept = {a: d for d, dim in enumerate(goal) for a in dim}
    moved = [a for d, dim in enumerate(now) for a in dim if kept.get(a, d) != d]
    gathered = {a for a in axes_of(now) if a not in kept}
    if not moved or not gathered:
        return None
    spec = tuple(
        tuple(a for a in before if a in gathered) + tuple(after) for before, after in zip(now, goal, strict=True)
    )
    return spec if all(n % shard_count((dim,), mesh) == 0 for n, dim in zip(shape, spec, strict=True)) else None
