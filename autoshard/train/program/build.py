"""Build the model, the train step and the data that a config names: built-in ones, or the user's own."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig
from autoshard.models.moe import MoEConfig
from autoshard.models.remat.policies import kept_on_device
from autoshard.models.wide_resnet import WideResNetConfig
from autoshard.models.workloads import Workload
from autoshard.sharding.planner.variants import Attempt
from autoshard.train.config.merging import replaced
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.rows.encoding import RowEncoder
from autoshard.train.data.rows.row_source import row_source
from autoshard.train.data.text_data import Source, TokenSource, text_source
from autoshard.train.data.tokenizer import load_codec
from autoshard.train.old_names import accepts_old_keywords
from autoshard.train.program.constants import (
    REMATS,
    SEARCHED_MICROBATCHES,
    SEARCHED_REMAT_MIXES,
    VOCAB_MULTIPLE,
)
from autoshard.train.program.pretrained import fit_pretrained, frozen_globs, pretrained_builder, trained_globs
from autoshard.train.step.ema import EmaConfig
from autoshard.train.step.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from autoshard.train.step.preference import dpo_loss
from autoshard.train.step.train_state import Program, TrainState, make_program
from autoshard.train.step.train_step import Loss, TrainStep, loss_and_weight, make_train_step
from autoshard.train.user_functions import is_function, load_function

ADAMW = OptimizerConfig()
"""The optimizer of named workloads."""
_STEPS = 1000  # of the schedule of a named workload, which is planned and measured, not trained


def fit_vocab(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """Return the config with a vocabulary of at least `vocab_size`. That of a pretrained model is fixed."""
    if config.pretrained.folder is not None:
        return fit_pretrained(config, vocab_size)
    if vocab_size <= config.gpt.vocab:
        return config
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return replaced(config, "gpt", gpt=replaced(config.gpt, "gpt", vocab=padded))


def fit_tokenizer(config: TrainConfig) -> TrainConfig:
    """Return the config with a vocabulary that holds its tokenizer's; no data is read."""
    return fit_vocab(config, load_codec(config.tokenizer_file).vocab_size)


def model_builder(config: TrainConfig) -> Callable[[nnx.Rngs], nnx.Module]:
    """Return the function that makes the model from random streams.

    Raises:
        ConfigError: The factory cannot be found, or needs other arguments. The returned function raises it if the
            factory does not return an `nnx.Module` or a `GPTConfig`.
    """
    if config.pretrained.folder is not None:
        return pretrained_builder(config)
    if config.model == "gpt":
        cfg = config.gpt
        if is_pipelined(config):  # the planner moves to the host what the layers keep
            cfg = replace(cfg, remat=kept_on_device(cfg.remat))
        return lambda rngs: GPT(cfg, rngs=rngs)
    return factory_builder(config.model, vocab=config.gpt.vocab, context=config.gpt.context)


def factory_builder(name: str, *, vocab: int, context: int) -> Callable[[nnx.Rngs], nnx.Module]:
    """Import the factory `package.module:function`, and return a function that makes its model from random streams.

    Raises:
        ConfigError: The factory cannot be found. The returned function raises it if the factory does not return an
            `nnx.Module` or a `GPTConfig`.
    """
    factory = load_function(name, "--model", "gpt for the built-in model")
    offered = ("rngs", "vocab", "context")
    if missing := _required(factory, offered):
        raise ConfigError(
            f"--model {name}: its parameter {', '.join(missing)} has no default value, and a factory is called with "
            f"{', '.join(offered)} only. Give its other parameters default values"
        )

    def build(rngs: nnx.Rngs) -> nnx.Module:
        model = factory(**_accepted(factory, {"rngs": rngs, "vocab": vocab, "context": context}))
        if isinstance(model, GPTConfig):
            model = GPT(model, rngs=rngs)
        if not isinstance(model, nnx.Module):
            raise ConfigError(f"--model {name} returned {type(model).__name__}, not an nnx.Module")
        return model

    return build


def make_program_of(config: TrainConfig) -> Program:
    """Make the model and the optimizer of a run.

    Raises:
        ConfigError: The factory is unknown, a glob matches nothing, or the warm-up is longer than the run.
    """
    optimizer = make_optimizer(config.optimizer, config.steps)
    ema = EmaConfig(config.ema_decay, config.ema_every, config.ema_spike)
    freeze = (*config.freeze, *frozen_globs(config))
    return make_program(
        model_builder(config), optimizer, freeze=freeze, ema=ema, train=trained_globs(config), guard=config.guard
    )


def is_pipelined(config: TrainConfig) -> bool:
    """Say whether the planner cuts the step into stages: as the plan says, or as many as it finds for a schedule."""
    searched = config.schedule is not None and config.plan is None and config.mesh is None
    return searched or config.stages > 1


def train_step_of(config: TrainConfig, program: Program) -> TrainStep:
    """Make the train step of a run. If its plan is a pipeline, the planner cuts the step into microbatches."""
    count = 1 if is_pipelined(config) else config.microbatches
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    return make_train_step(program, schedule, count, loss_of(config))


def loss_of(config: TrainConfig) -> Loss:
    """Return the loss of a run."""
    if config.loss == "dpo":
        return lambda model, batch, key: dpo_loss(model, batch, config.dpo)
    return loss_and_weight


def loss_item(config: TrainConfig) -> str:
    """Return what the loss of a run is a mean over."""
    return "pair" if config.loss == "dpo" else "token"


@accepts_old_keywords
def workload_step(
    work: Workload, microbatches: int = 1, *, optimizer: OptimizerConfig = ADAMW
) -> tuple[TrainStep, TrainState, dict[str, Any]]:
    """Make the train step of a named workload, and the shapes of its state and of its batch.

    Args:
        work: The model and its batch.
        microbatches: Microbatches per batch.
        optimizer: How parameters are updated.

    Raises:
        ConfigError: The batch does not divide into them.
    """
    program = _program(work, optimizer)
    step = _workload_step(work, program, microbatches, optimizer)
    return step, program.abstract_state(), work.batch()


def workload_steps(
    work: Workload, optimizer: OptimizerConfig = ADAMW
) -> Callable[[str, int], tuple[TrainStep, TrainState, dict[str, Any]]]:
    """Make the function that returns `workload_step` of a remat policy and a number of microbatches.

    They change no shapes, so the shapes are found once.
    """
    shared = _shared_optimizer(optimizer)
    program_of = _programs(work, shared)
    state, batch = make_program(work.build, shared).abstract_state(), work.batch()

    def step(remat: str, microbatches: int) -> tuple[TrainStep, TrainState, dict[str, Any]]:
        return _workload_step(work, program_of(remat), microbatches, optimizer), state, batch

    return step


def _shared_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Make an optimizer for several steps of the same parameters: its update is traced once and inlined into each."""
    made = make_optimizer(config, _STEPS)
    return optax.GradientTransformation(made.init, jax.jit(made.update, inline=True))


def _programs(work: Workload, optimizer: optax.GradientTransformation) -> Callable[[str], Program]:
    """Make the function from a remat policy to the program. Microbatches do not change the model."""
    return functools.cache(lambda remat: make_program(work.with_(remat=remat).build, optimizer))


def _program(work: Workload, optimizer: OptimizerConfig) -> Program:
    return make_program(work.build, make_optimizer(optimizer, _STEPS))


def _workload_step(work: Workload, program: Program, microbatches: int, optimizer: OptimizerConfig) -> TrainStep:
    if microbatches < 1:
        raise ConfigError(f"{work.name}: microbatches is {microbatches}; it must be at least 1")
    if work.batch_size % microbatches:
        raise ConfigError(f"{work.name}: a batch of {work.batch_size} does not divide into {microbatches} microbatches")
    return make_train_step(program, learning_rate_schedule(optimizer, _STEPS), microbatches)


def workload_variants(
    work: Workload, optimizer: OptimizerConfig = ADAMW
) -> tuple[Callable[..., Any], TrainState, dict[str, Any]]:
    """Make a workload's step with static keywords, `step(state, batch, *, remat, microbatches)`, and its shapes.

    The step raises an `AutoshardError` if the workload's model does not know the remat policy.
    """
    steps: dict[Any, TrainStep] = {}
    shared = _shared_optimizer(optimizer)
    program_of = _programs(work, shared)

    # Plans saved before the rename have the variant `accumulation`, which the step also accepts.
    @accepts_old_keywords
    def train_step(state: TrainState, batch: Mapping[str, Any], *, remat: str, microbatches: int) -> Any:
        if (remat, microbatches) not in steps:
            steps[remat, microbatches] = _workload_step(work, program_of(remat), microbatches, optimizer)
        return steps[remat, microbatches](state, batch)

    return train_step, make_program(work.build, shared).abstract_state(), work.batch()


def workload_variant_values(work: Workload, *, numerics: bool = False) -> dict[str, list[Any]]:
    """List the variants of a workload's step, by static keyword.

    Microbatches change the numbers if part of the loss depends on the whole batch, as batch statistics and router
    losses do. The capacity of experts does so too: it is counted in each microbatch.

    Args:
        work: The workload.
        numerics: Whether to include variants that change the numbers.
    """
    one_only = isinstance(work.config, MoEConfig | WideResNetConfig) and not numerics
    divisors = [n for n in SEARCHED_MICROBATCHES if not work.batch_size % n]
    return {"remat": list(REMATS), "microbatches": [1] if one_only else divisors}


def remat_unit_count(config: Any) -> int:
    """Count the units that a model's `remat` applies to: layers, groups of layers with experts, or residual blocks."""
    if isinstance(config, MoEConfig):
        return config.gpt.layers // config.moe_every
    return sum(config.stages) if isinstance(config, WideResNetConfig) else config.layers


def variant_search(
    variants: Mapping[str, Sequence[Any]], layers: int
) -> Callable[[Sequence[Attempt]], list[dict[str, Any]]]:
    """Make the function that `autoshard.plan` takes as `variants`: all combinations first, then mixed remat policies.

    If one policy does not fit and the next stricter one does, the next round mixes them: three, two or one of every
    four layers have the lighter policy, as many as the memory estimate allows. If a mix does not fit, fewer are tried.

    Args:
        variants: The values of `remat` and of other keywords.
        layers: Number of layers.
    """
    names = list(variants)

    def next_variants(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
        if not attempts:
            return [dict(zip(names, values, strict=True)) for values in itertools.product(*variants.values())]
        known = {tuple(each.keywords[name] for name in names): each for each in attempts}
        found: list[dict[str, Any]] = []
        rest = [name for name in names if name != "remat"]
        for values in itertools.product(*(variants[name] for name in rest)):
            others = dict(zip(rest, values, strict=True))

            def attempt_with(remat: str, others: dict[str, Any] = others) -> Attempt | None:
                return known.get(tuple({**others, "remat": remat}[name] for name in names))

            remat = _next_remat_mix(attempt_with, [r for r in REMATS if r in variants["remat"]], layers)
            found += [{**others, "remat": remat}] if remat else []
        return found

    return next_variants if "remat" in names else lambda attempts: [] if attempts else next_variants(attempts)


def _next_remat_mix(attempt_with: Callable[[str], Attempt | None], remats: Sequence[str], layers: int) -> str | None:
    """Return the next mix to try, of a policy that does not fit and the next stricter one, which fits; None if none.

    Args:
        attempt_with: Returns the attempt with a given remat policy and fixed other keywords; None if it was not tried.
        remats: Policies, the lightest first.
        layers: Number of layers.
    """
    for light, strict in itertools.pairwise(remats):
        lighter, stricter = attempt_with(light), attempt_with(strict)
        if lighter is None or stricter is None or lighter.fits or not stricter.fits:
            continue
        if math.isinf(lighter.peak_memory_bytes):
            continue
        # Fraction of the layers that can have the lighter policy if memory grows linearly with their number.
        room = (stricter.limit_bytes - stricter.peak_memory_bytes) / (
            lighter.peak_memory_bytes - stricter.peak_memory_bytes
        )
        for count, period in SEARCHED_REMAT_MIXES:
            mixed = ",".join([light] * count + [strict] * (period - count))
            if layers > period and not layers % period and count <= room * period:
                found = attempt_with(mixed)
                if found is None or found.fits:
                    return mixed if found is None else None
    return None


def make_source(config: TrainConfig) -> Source:
    """Open the data of a run.

    Raises:
        DataError: The data are missing, empty or binary.
        ConfigError: The function cannot be found, or returns neither token arrays nor a source.
    """
    batch = {"batch_size": config.batch_size, "eval_batch_size": config.eval_batch_size}
    if config.reads_rows:
        return _rows_of(config, batch)
    if not is_function(config.data):
        return text_source(
            config.data, context=config.gpt.context, seed=config.seed, tokenizer=config.tokenizer_file, **batch
        )
    assert config.data is not None
    made = load_function(config.data, "--data")(config)
    if isinstance(made, Source):
        return made
    tokens = [np.asarray(part) for part in made] if isinstance(made, tuple | list) else []
    if len(tokens) != 2 or any(part.ndim != 1 or part.dtype.kind not in "iu" for part in tokens):
        raise ConfigError(
            f"--data {config.data} returned {type(made).__name__}: return (training tokens, held-out tokens) "
            "as one-dimensional integer arrays, or an autoshard.train.data.text_data.Source"
        )
    vocab_size = max(int(part.max(initial=0)) + 1 for part in tokens)
    return TokenSource(*tokens, vocab_size=vocab_size, context=config.gpt.context, seed=config.seed, **batch)


def _rows_of(config: TrainConfig, batch: Mapping[str, int]) -> Source:
    """Open rows of instruction data, with the tokenizer and the chat template of the pretrained model."""
    assert config.data is not None and config.model_folder is not None
    if config.tokenizer_file is None:
        raise ConfigError(f"{str(config.model_folder)!r} has no tokenizer.json: download it, or give --tokenizer")
    return row_source(
        config.data,
        RowEncoder.of(config.model_folder, config.tokenizer_file),
        pairs=config.batch_kind == "pairs",
        packed=config.rows.pack,
        held_out=config.rows.held_out,
        context=config.gpt.context,
        seed=config.seed,
        **batch,
    )


def _required(function: Callable[..., Any], offered: Sequence[str]) -> list[str]:
    """The parameters without a default value that are not among those offered by keyword."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in variable
        and (parameter.name not in offered or parameter.kind is parameter.POSITIONAL_ONLY)
    ]


def _accepted(function: Callable[..., Any], available: dict[str, Any]) -> dict[str, Any]:
    """Select the keyword arguments that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return available
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in available.items() if name in names}
