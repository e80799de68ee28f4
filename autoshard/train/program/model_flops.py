"""Counts the FLOPs of a model's training step, for its MFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from autoshard import _compat
from autoshard.sharding.program.flops import matmul_flops
from autoshard.spmdrules.ir.program import build
from autoshard.train.step.train_state import Program
from autoshard.train.step.train_step import Loss, loss_and_weight


def step_flops(
    program: Program, batch: Mapping[str, jax.ShapeDtypeStruct], loss_of: Loss = loss_and_weight, *, platform: str
) -> float:
    """Count the FLOPs of the products of a step: the loss and its gradients, without recomputation and optimizer.

    A matrix product of a trained layer counts three times: forward, and for two gradients. Where the weights are frozen
    it counts twice, and where nothing before it is trained either, once. A kernel counts what it computes, so causal
    attention may count half, and its backward pass counts the scores that it computes again. Embedding lookups and
    elementwise operators do not count. Nothing is computed.

    Args:
        program: The model; of its parameters, the frozen ones have no gradient.
        batch: Shapes and dtypes of a batch.
        loss_of: Computes the sum of a batch's losses and the sum of their weights.
        platform: `tpu`, `gpu` or `cpu`: of a product of groups, platforms compute different parts.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from autoshard.train.step.train_state import make_program
        >>> class Regression(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense = nnx.Linear(16, 4, rngs=rngs)
        ...     def loss(self, batch):
        ...         return jnp.sum(self.dense(batch["x"]) ** 2), jnp.float32(len(batch["x"]))
        >>> program = make_program(Regression, optax.sgd(0.1))
        >>> step_flops(program, {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}, platform="cpu")
        2048.0
    """
    state = program.abstract_state()

    def loss(params: Any, frozen: Any, variables: Any, batch: Any, key: Any) -> jax.Array:
        return loss_of(program.model(params, frozen, variables, key), batch, key)[0]

    params, structure = jax.tree.flatten(state.params)
    others = state.frozen, state.variables, dict(batch), jax.eval_shape(jax.random.key, 0)
    saving = _compat.jaxpr_as_function(without_recomputation(jax.make_jaxpr(loss)(state.params, *others)))

    def gradients(params: list[Any], *others: Any) -> list[Any]:
        return jax.grad(lambda given: saving(*given, *jax.tree.leaves(others))[0])(params)

    traced = build(_compat.dce(_compat.classic(jax.make_jaxpr(gradients)(params, *others))))
    return float(sum(op.trips * sum(matmul_flops(op, platform).values()) for op in traced.ops()))


def without_recomputation(closed: Any) -> Any:
    """Return a closed jaxpr, before differentiation, whose checkpoints save all values, also those in bodies."""
    return _saving(_compat.classic(closed))


def _saving(closed: Any) -> Any:
    eqns = []
    for eqn in _compat.open_jaxpr(closed).eqns:
        params = {name: _parameter(value) for name, value in eqn.params.items()}
        if eqn.primitive.name == "remat2":
            params["policy"] = jax.checkpoint_policies.everything_saveable
        eqns.append(eqn.replace(params=params))
    return _compat.with_equations(closed, eqns)


def _parameter(value: Any) -> Any:
    if _compat.is_jaxpr(value):
        return _saving(value)
    if isinstance(value, tuple | list) and any(map(_compat.is_jaxpr, value)):
        return type(value)(map(_parameter, value))
    return value
