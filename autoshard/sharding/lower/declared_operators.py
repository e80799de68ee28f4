"""Operators with a declared rule run on shards under `shard_map`: by that rule, or by that of another form.

On TPUs, an optimization barrier joins the results of an operator that computes gradients of weights. Nothing in the
body of a loop takes such a gradient. It only goes into a stack. So without the barrier, XLA:TPU computes the gradients
of all layers in the body at its end. Until then, it holds their operands. For experts, these are the tokens, the hidden
units and the gradients of both. Compiled with libtpu 0.0.42.1, eight layers of Mixtral 8x7B with four layers in the
body and 1024 rows of 4096 tokens (`benchmarks/gradient_barriers.py`):

    target        strategy            peak with, without the barrier   roofline with, without
    v5p:4x8x8     dp:2 fsdp:128       14.7, 23.1 GiB                   1178, 1188 ms
    v6e:16x16     dp:16 ep:16 state   14.2, 22.4 GiB                   971, 966 ms

With one layer in the body, the memory is the same, and the times differ by 0.2 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.operator_sharding import operand_spec, sharded_factors
from autoshard.sharding.layout.operator_strategy import OperatorStrategy
from autoshard.sharding.lower.body_lowering import BodyLowering
from autoshard.spmdrules.core.layer_stacks import layer_stacks
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.core.reshard_path import reshard_path
from autoshard.spmdrules.custom_ops.opaque_primitive import BatchedFunction
from autoshard.spmdrules.custom_ops.operator import run_opaque_on_shards, run_sharded
from autoshard.spmdrules.ir.program import Op


def run_declared(
    lowering: BodyLowering, op: Op, chosen: OperatorStrategy, wants: Sequence[Spec], args: Sequence[Any]
) -> list[Any]:
    """Return the results of an operator, with their wanted shardings.

    Args:
        lowering: what lowers the program.
        op: the operator.
        chosen: its strategy.
        wants: the wanted shardings of its results.
        args: its operands.
    """
    results = _results(lowering, op, chosen, wants, args)
    if lowering.tpu is not None and gives_gradients(op, lowering.layout.roles):
        results = lax.optimization_barrier(results)
    return results


def gives_gradients(op: Op, roles: Roles) -> bool:
    """Whether an operator computes both gradients of weights and values that the backward pass needs."""
    gradients = [v in roles.gradients for v in op.results]
    return any(gradients) and not all(gradients)


def _results(
    lowering: BodyLowering, op: Op, chosen: OperatorStrategy, wants: Sequence[Spec], args: Sequence[Any]
) -> list[Any]:
    mesh, constrain = lowering.mesh, lowering.constrain
    stored = [operand_spec(lowering.layout, v) if v >= 0 else () for v in op.operands]
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
