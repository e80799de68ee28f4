"""The optimizer: clipping by global norm, AdamW or SGD, and a schedule of linear warm-up and cosine decay."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from autoshard.errors import ConfigError


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    learning_rate: float = 1e-3
    """Peak learning rate, at the end of the warm-up."""
    min_learning_rate: float = 1e-4
    """Learning rate at the last step, at the end of the cosine decay."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW: added to the square root of the second moment."""
    weight_decay: float = 0.1
    """AdamW: decoupled weight decay; only matrices are decayed."""
    no_decay: tuple[str, ...] = ("*bias", "*scale", "*norm*", "*/b[qkvo]", "*/b_*")
    """Globs over /-joined paths of parameters that are not decayed. Vectors never are."""
    momentum: float = 0.0
    """SGD: momentum."""
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to this norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        """Refuse negative and non-finite numbers, all in one error."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        if wrong := {name: value for name, value in numbers.items() if not 0 <= value < math.inf}:
            raise ConfigError(
                "; ".join(f"{name} is {v}; it must be at least 0 and finite" for name, v in wrong.items())
            )


def path_name(path: Sequence[Any]) -> str:
    """Write a pytree key path as `layers/0/attention/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches one of the globs. `*` also matches `/`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Make the schedule: linear warm-up to the peak, then cosine decay to the minimum at the last step.

    The first step's rate is above zero.

    Raises:
        ConfigError: The warm-up is as long as the run or longer.
    """
    if config.warmup_steps >= steps > 0:
        raise ConfigError(
            f"optimizer.warmup_steps is {config.warmup_steps}, but the run has {steps} steps: use fewer warm-up steps"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.min_learning_rate,
    )


def decay_mask(params: Any, no_decay: Sequence[str]) -> Any:
    """Return True for each parameter that is decayed: arrays of rank 2 or more whose path matches none of the globs.

    Stacked vectors also have rank 2, such as the norm scales of scanned layers, `[layers, embed]`. The globs exclude
    them.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim >= 2 and not matches(path_name(path), no_decay), params
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Make the gradient transformation: clipping, then AdamW or SGD with the learning rate schedule.

    Args:
        config: The settings.
        steps: Steps of the run; the learning rate decays until the last one.

    Raises:
        ConfigError: The warm-up is as long as the run or longer.
    """
    schedule = learning_rate_schedule(config, steps)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    if config.name == "sgd":
        return optax.chain(clip, optax.sgd(schedule, momentum=config.momentum or None))
    return optax.chain(
        clip,
        optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: decay_mask(params, config.no_decay),
        ),
    )
