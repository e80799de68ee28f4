"""Trains a small GPT, on one device or sharded, and keeps the results for a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from autoshard import auto_shard
from autoshard.models import GPT, GPTConfig
from autoshard.train.step.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from autoshard.train.step.train_state import as_key, make_program
from autoshard.train.step.train_step import loss_and_weight, make_train_step

STEPS = 20  # chosen
BATCH = 16  # chosen: divisible by eight devices and two microbatches


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    changes: tuple[tuple[str, Any], ...] = ()
    microbatches: int = 1

    @property
    def config(self) -> GPTConfig:
        """The model's config: small, with eight heads so that they can be sharded over eight devices."""
        small = GPTConfig(vocab=64, layers=2, heads=8, width=64, ffn=128, context=16, block_size=8)
        return replace(small, **dict(self.changes))


@dataclass(frozen=True)
class Run:
    """The results of a run: gradients at SGD's first and last state, its final parameters, and AdamW's losses."""

    gradients: list[Any] = field(default_factory=list)
    params: Any = None
    losses: list[float] = field(default_factory=list)
    plan: Any = None


def batches() -> list[dict[str, np.ndarray]]:
    """Makes a batch for each step, with some positions masked."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (STEPS, BATCH, 17)).astype(np.int32)
    mask = (rng.random((STEPS, BATCH, 16)) < 0.9).astype(np.float32)
    return [{"inputs": t[:, :-1], "targets": t[:, 1:], "mask": m} for t, m in zip(tokens, mask, strict=True)]


@cache
def run(case: Case, plan: Any = None, sharded: bool = True) -> Run:
    """Trains a case, under `auto_shard` or, if not `sharded`, under `jax.jit` on one device."""

    def transform(fn: Any) -> Any:
        return auto_shard(fn, plan=plan) if sharded else jax.jit(fn)

    gradients, params, _, chosen = _train(case, "sgd", transform)
    return Run(gradients, params, _train(case, "adamw", transform)[2], chosen)


def _train(case: Case, optimizer: Any, transform: Any) -> tuple[list[Any], Any, list[float], Any]:
    settings = OptimizerConfig(name=optimizer, learning_rate=0.05 if optimizer == "sgd" else 1e-2, warmup_steps=2)
    schedule = learning_rate_schedule(settings, STEPS)

    def build(rngs: nnx.Rngs) -> GPT:
        return GPT(case.config, rngs=rngs)

    program = make_program(build, make_optimizer(settings, STEPS))
    step = transform(make_train_step(program, schedule, case.microbatches))

    def loss(params: Any, state: Any, batch: Any) -> jax.Array:
        key = jax.random.fold_in(as_key(state.key), state.step)
        model = program.model(params, state.frozen, state.variables, key)
        total, weight = loss_and_weight(model, batch, key)
        return total / weight

    gradient = transform(lambda state, batch: jax.grad(loss)(state.params, state, batch))
    state, gradients, losses = program.create_state(jax.random.key(0)), [], []
    data = batches()
    if optimizer == "sgd":
        gradients.append(jax.device_get(gradient(state, data[0])))
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    if optimizer == "sgd":
        gradients.append(jax.device_get(gradient(state, data[0])))
    chosen = step.plan(state, data[0]) if hasattr(step, "plan") else None
    return gradients, jax.device_get(state.params), losses, chosen
