"""The train step and the evaluation step as functions of arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from autoshard import _compat
from autoshard.errors import ConfigError
from autoshard.models import cross_entropy
from autoshard.train.old_names import accepts_old_keywords
from autoshard.train.step.ema import averaged_params, updated
from autoshard.train.step.guard import (
    IN_A_ROW,
    SKIPPED,
    SQUARES,
    VERDICT,
    gradient_squares,
    judge,
    unless_bad,
    updates_so_far,
)
from autoshard.train.step.schedule_free import evaluated_value, schedule_free_state
from autoshard.train.step.train_state import Program, TrainState, Tree, as_key

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
BatchKind = Literal["text", "packed", "pairs"]
Loss = Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, jax.Array]]
EvalStep = Callable[[Tree, Tree, Tree, Batch], tuple[jax.Array, jax.Array]]


def batch_shapes(batch_size: int, context: int, kind: BatchKind = "text") -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch, each `[batch, seq]`: input tokens, target tokens, and a mask of those that count.

    A batch of packed documents also has `positions` and `segment_ids`. A batch of pairs has two sequences a row,
    `[batch, 2, seq]`.
    """
    names = {"inputs": jnp.int32, "targets": jnp.int32, "mask": jnp.float32}
    if kind == "packed":
        names |= {"positions": jnp.int32, "segment_ids": jnp.int32}
    shape = (batch_size, 2, context) if kind == "pairs" else (batch_size, context)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in names.items()}


def loss_and_weight(model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Compute the sum of a batch's losses and the sum of its weights, both float32 `[]`.

    A model with a method `loss(batch)` returns this pair itself. Any other model maps inputs to logits
    `[batch, seq, vocab]`; its loss is their cross-entropy with the targets, in nats. A method that accepts
    `deterministic` or `rngs` gets them: whether this is evaluation, and the random streams.

    Args:
        model: The model, with its arrays.
        batch: One batch.
        key: Random key in training, None in evaluation.
    """
    method = model.loss if hasattr(model, "loss") else model
    given = {"deterministic": key is None, "rngs": None if key is None else nnx.Rngs(key)}
    accepted = inspect.signature(method).parameters
    options = {name: value for name, value in given.items() if name in accepted}
    if hasattr(model, "loss"):
        return method(batch, **options)
    return cross_entropy(method(batch["inputs"], **options), batch["targets"], batch["mask"])


@accepts_old_keywords
def make_train_step(
    program: Program, schedule: optax.Schedule, microbatches: int = 1, loss_of: Loss = loss_and_weight
) -> TrainStep:
    """Make the function `(state, batch) -> (state, metrics)`.

    The gradient is that of the token-weighted mean over the whole batch, for any number of microbatches: the sums of
    losses, gradients and weights are accumulated over the microbatches and divided once.

    If the program has a guard, a bad step keeps the state, and the metrics have the verdict; see `guard`.

    Args:
        program: The model and its optimizer.
        schedule: Learning rate by step, for the metrics.
        microbatches: Microbatches per batch.
        loss_of: Computes the sum of a batch's losses and the sum of their weights.
    """

    def loss_sum(params: Tree, frozen: Tree, variables: Tree, batch: Batch, key: jax.Array):
        model = program.model(params, frozen, variables, key)
        loss, weight = loss_of(model, batch, key)
        return loss, (weight, program.variables(model))

    gradients_of = jax.value_and_grad(loss_sum, has_aux=True)

    def accumulated(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Tree, Tree]:
        key = jax.random.fold_in(as_key(state.key), state.step)
        if microbatches == 1:
            (loss, (weight, variables)), gradients = gradients_of(
                state.params, state.frozen, state.variables, batch, jax.random.fold_in(key, 0)
            )
            return loss, weight, variables, gradients

        def add(carry: Any, indexed: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            loss, weight, variables, gradients = carry
            index, batch = indexed
            (more_loss, (more_weight, variables)), more = gradients_of(
                state.params, state.frozen, variables, batch, jax.random.fold_in(key, index)
            )
            gradients = jax.tree.map(jnp.add, gradients, more)
            return (loss + more_loss, weight + more_weight, variables, gradients), None

        zero = jnp.zeros((), jnp.float32)
        start = (zero, zero, state.variables, jax.tree.map(jnp.zeros_like, state.params))
        stacked = jax.tree.map(functools.partial(_microbatches, count=microbatches), dict(batch))
        return jax.lax.scan(add, start, (jnp.arange(microbatches), stacked))[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, weight, variables, gradients = accumulated(state, batch)
        scale = 1.0 / jnp.maximum(weight, 1.0)
        gradients = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
        squares = gradient_squares(gradients)
        mean_loss, norm = loss * scale, jnp.sqrt(functools.reduce(jnp.add, squares))
        done = updates_so_far(state.step, state.guard)
        updates, opt_state = program.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = updated(ema, params, mean_loss, jnp.isfinite(norm), done + 1, program.ema)
        metrics = {
            "loss": mean_loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(schedule(done), jnp.float32),
            "weight": weight,
        }
        after, guard = (params, variables, opt_state, ema), state.guard
        if program.guard is not None:
            verdict, guard = judge(program.guard, guard, mean_loss, norm)
            after = unless_bad(verdict, (state.params, state.variables, state.opt_state, state.ema), after)
            metrics |= {VERDICT: verdict, SQUARES: jnp.stack([each.astype(jnp.float32) for each in squares])}
            metrics |= {name: guard[name] for name in (SKIPPED, IN_A_ROW) if guard is not None and name in guard}
        params, variables, opt_state, ema = after
        return replace(
            state,
            step=state.step + 1,
            params=params,
            variables=variables,
            opt_state=opt_state,
            ema=ema,
            guard=guard,
        ), metrics

    return train_step


def make_eval_step(program: Program, loss_of: Loss = loss_and_weight) -> EvalStep:
    """Make the function `(params, frozen, variables, batch) -> (sum of losses, weight)`, without dropout."""

    def eval_step(params: Tree, frozen: Tree, variables: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return loss_of(program.model(params, frozen, variables, None), batch, None)

    return eval_step


def eval_params(state: TrainState, use_ema: bool = True) -> Tree:
    """Return the parameters to evaluate: their average, or the parameters themselves if there is none.

    A schedule-free optimizer has its own average. The moving average is used if there is one and `use_ema` is set. An
    average that waits in host memory is brought to the devices.
    """
    if (own := schedule_free_state(state.opt_state)) is not None:
        return jax.tree.map(partial(evaluated_value, b1=own.b1), state.params, _on_devices(own.z))
    if not use_ema or state.ema is None:
        return state.params
    return averaged_params(_on_devices(state.ema), state.params)


def _on_devices(tree: Tree) -> Tree:
    """Return a tree with its arrays in device memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if _compat.is_on_host(x) else x, tree)


def _microbatches(leaf: jax.Array, count: int) -> jax.Array:
    """Reshape `[batch, ...]` to `[count, batch / count, ...]`; microbatch i has the rows i, i + count, ...

    With strided rows each microbatch is sharded over devices as the batch is. Consecutive rows would be on a few
    devices only.
    """
    if leaf.shape[0] % count:
        raise ConfigError(f"a batch of {leaf.shape[0]} does not divide into {count} microbatches")
    return jnp.swapaxes(leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:]), 0, 1)
