"""Operators with a declared rule run on shards under `shard_map`: by that rule, or by that of another form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.sharding.layout.operator_sharding import sharded_factors
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.spmdrules.core.layer_stacks import layer_stacks
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.core.reshard_path import reshard_path
from autoshard.spmdrules.custom_ops.opaque_primitive import BatchedFunction
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
    args = sliced_stacks(op, chosen, stored, args, constrain)
    args = [
        reduce(constrain, reshard_path(now, chosen.spec(dims))[:-1], x)  # `shard_map` does the rest
        for x, now, dims in zip(args, stored, chosen.rule(op).operands, strict=True)
    ]
    if (form := chosen.form) is None:
        specs = [chosen.spec(dims) for dims in chosen.rule(op).operands]
        return run_sharded(op.eqn.params, mesh, specs, wants, *args)
    results, factors = [v.aval for v in op.eqn.outvars], sharded_factors(chosen, mesh.shape)
    return run_opaque_on_shards(form.rule, partial(form.form.run, form.axes), results, mesh, factors, wants, *args)


def sliced_stacks(
    op: Op,
    chosen: OperatorStrategy,
    stored: Sequence[Spec],
    args: Sequence[Any],
    constrain: Callable[[Any, Spec], Any],
) -> list[Any]:
    """Return the operands. If one of the stacks of layers is resharded, they are those of the layer alone.

    Else the operator gets whole stacks. The arguments are as above.
    """
    stacks, rule = layer_stacks(op.eqn.params.get("fn")), chosen.rule(op)
    if stacks is None or isinstance(op.eqn.params.get("fn"), BatchedFunction) or chosen.form is not None:
        return [*args]
    places = [i for i, dims in enumerate(rule.operands) if dims[:1] == ((stacks.factor,),)]
    if all(stored[i] == chosen.spec(rule.operands[i]) or args[i].shape[0] == 1 for i in places):
        return [*args]
    own, number = [*args], args[stacks.layer]
    for i in places:
        own[i] = constrain(lax.dynamic_slice_in_dim(args[i], number[0], 1), stored[i])
    own[stacks.layer] = jnp.zeros_like(number)
    return own
