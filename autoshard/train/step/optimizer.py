"""The optimizer: clipping by global norm, an optimizer of optax, and a schedule of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from autoshard.errors import ConfigError
from autoshard.train.step.matrices import check_matrices, matrix_dimensions, read_matrices
from autoshard.train.step.named_optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    check_optimizer,
    check_schedule,
    optimizer_by_name,
    takes,
)
from autoshard.train.step.parameter_paths import matches, path_name
from autoshard.train.user_functions import is_function, load_function


@dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    name: str = "adamw"
    """The optimizer: adamw, sgd, muon, schedule_free, another of optax (adafactor, adagrad, adam, adan, lamb, lion,
    nadamw, rmsprop), or package.module:function, which is called with the schedule and returns an
    optax.GradientTransformation."""
    arguments: tuple[str, ...] = ()
    """Arguments of the optimizer's function in optax, such as b1=0.95 b2=0.98. They take precedence over the settings
    below."""
    schedule: str = "cosine"
    """The learning rate after the warm-up: `cosine` and `linear` decay until the last step, `wsd` is constant and then
    decays linearly, `constant`; or package.module:function, which is called with this config and the number of steps
    and returns an optax.Schedule."""
    decay_share: float = 0.2
    """Schedule wsd: the share of the steps after the warm-up, at the end, in which the learning rate decays."""
    learning_rate: float = 1e-3
    """Peak learning rate, at the end of the warm-up."""
    min_learning_rate: float = 1e-4
    """Learning rate at the last step, at the end of the decay."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW: decay of the first moment; also of Muon's Adam. Schedule-free: share of the average in the parameters that
    the gradient is taken at."""
    beta2: float = 0.95
    """AdamW, schedule_free and Muon's Adam: decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW, schedule_free and muon: added to the square root of the second moment; Muon also adds it to norms."""
    weight_decay: float = 0.1
    """AdamW, adan, lamb, lion, nadamw, schedule_free and muon: decoupled weight decay; only matrices are decayed. Muon
    decays those that it orthogonalizes."""
    no_decay: tuple[str, ...] = ("*bias", "*scale", "*norm*", "*/b[qkvo]", "*/b_*")
    """Globs over /-joined paths of parameters that are not decayed. Vectors never are. Muon leaves these
    parameters to Adam."""
    momentum: float = 0.0
    """SGD: momentum."""
    matrices: tuple[str, ...] = ()
    """Muon: which parameters are matrices, as GLOB=INPUTS:OUTPUTS with the numbers of their dimensions, such as
    `*conv/kernel=0,1,2:3`; other dimensions stack matrices. GLOB=none leaves a parameter to Adam. The built-in models
    need none; of others, parameters of rank 2 are matrices, except embeddings, heads and stacked vectors."""
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to this norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        """Refuse unknown names, and negative and non-finite numbers, each kind in one error."""
        check_optimizer(self.name, self.arguments)
        check_schedule(self.schedule)
        read_matrices(self.matrices)
        if self.name == "schedule_free" and self.schedule in SCHEDULES and self.schedule != "constant":
            raise ConfigError(
                f"optimizer.schedule is {self.schedule}, but schedule_free averages the parameters in place of a "
                "decay: give --optimizer.schedule constant"
            )
        if self.name == "schedule_free" and not 0 < self.beta1 < 1:
            raise ConfigError(f"beta1 is {self.beta1}; with schedule_free it must be above 0 and below 1")
        if not 0 < self.decay_share <= 1:
            raise ConfigError(f"decay_share is {self.decay_share}; it must be above 0 and at most 1")
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        if wrong := {name: value for name, value in numbers.items() if not 0 <= value < math.inf}:
            raise ConfigError(
                "; ".join(f"{name} is {v}; it must be at least 0 and finite" for name, v in wrong.items())
            )


def unused_settings(config: OptimizerConfig) -> dict[str, str]:
    """Return the settings that have no effect with the optimizer and the schedule, and what each is for."""
    decaying = [name for name in OPTIMIZERS if takes(name, "weight_decay")]
    adams = ["adamw", "muon", "schedule_free"]
    users = dict.fromkeys(("beta1", "beta2", "epsilon"), adams) | {"momentum": ["sgd"], "matrices": ["muon"]}
    users |= dict.fromkeys(("weight_decay", "no_decay"), decaying)
    unused = {
        setting: f"--optimizer.name {', '.join(names)}" for setting, names in users.items() if config.name not in names
    }
    if config.schedule in SCHEDULES and config.schedule != "wsd":
        unused["decay_share"] = "--optimizer.schedule wsd"
    if config.schedule == "constant":
        unused["min_learning_rate"] = "--optimizer.schedule cosine, linear, wsd"
    return unused


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Make the schedule: linear warm-up to the peak, then what `config.schedule` says, until the last step.

    The first step's rate is above zero.

    Raises:
        ConfigError: The warm-up is as long as the run or longer.
    """
    if is_function(config.schedule):
        return load_function(config.schedule, "--optimizer.schedule")(config, steps)
    if config.warmup_steps >= steps > 0:
        raise ConfigError(
            f"optimizer.warmup_steps is {config.warmup_steps}, but the run has {steps} steps: use fewer warm-up steps"
        )
    rest = max(steps, config.warmup_steps + 1) - config.warmup_steps
    warmup = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate, config.warmup_steps
    )
    shape = SCHEDULES[config.schedule](config.learning_rate, config.min_learning_rate, rest, config.decay_share)
    return optax.join_schedules([warmup, shape], [config.warmup_steps])


def decay_mask(params: Any, no_decay: Sequence[str]) -> Any:
    """Return True for each parameter that is decayed: arrays of rank 2 or more whose path matches none of the globs.

    Stacked vectors also have rank 2, such as the norm scales of scanned layers, `[layers, embed]`. The globs exclude
    them.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim >= 2 and not matches(path_name(path), no_decay), params
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Make the gradient transformation: clipping, then the optimizer with the learning rate schedule.

    Args:
        config: The settings.
        steps: Steps of the run; the learning rate decays until the last one.

    Raises:
        ConfigError: The warm-up is as long as the run or longer.
    """
    schedule = learning_rate_schedule(config, steps)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    settings: dict[str, Any] = {
        "weight_decay": config.weight_decay,
        "mask": lambda params: decay_mask(params, config.no_decay),
    }
    if config.name == "sgd":
        settings = {"momentum": config.momentum or None}
    elif config.name in ("adamw", "schedule_free"):
        settings |= {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    elif config.name == "muon":
        given = read_matrices(config.matrices)
        settings = {
            "weight_decay": config.weight_decay,
            "adam_b1": config.beta1,
            "adam_b2": config.beta2,
            "eps": config.epsilon,
            "muon_weight_dimension_numbers": lambda params: matrix_dimensions(params, given, config.no_decay),
        }
        muon = optimizer_by_name(config.name, schedule, config.arguments, settings)
        return _checked(optax.chain(clip, muon), lambda params: check_matrices(params, given, config.no_decay))
    return optax.chain(clip, optimizer_by_name(config.name, schedule, config.arguments, settings))


def _checked(optimizer: optax.GradientTransformation, check: Callable[[Any], None]) -> optax.GradientTransformation:
    """Return an optimizer that first checks the parameters that it is to update."""

    def init(params: Any) -> Any:
        check(params)
        return optimizer.init(params)

    return optax.GradientTransformation(init, optimizer.update)
