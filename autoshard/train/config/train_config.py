"""The trainer's typed settings: from a preset, then a TOML file, then the command line; later ones take precedence."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autoshard._shown import shown
from autoshard.errors import ConfigError, PlanError
from autoshard.models import GPTConfig
from autoshard.models.adapters import LoraConfig
from autoshard.sharding.offload.words import AUTO
from autoshard.sharding.pipeline.pipelining import stages_of
from autoshard.sharding.pipeline.schedule_words import read_schedule
from autoshard.train.config import run_directory
from autoshard.train.config.offload_checks import offload_problems
from autoshard.train.config.pretrained_checks import pretrained_problems
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.profile_words import profile_problems
from autoshard.train.config.rows_config import RowsConfig
from autoshard.train.data.rows.records import has_rows
from autoshard.train.old_names import accepts_old_fields
from autoshard.train.step.guard import GuardConfig
from autoshard.train.step.optimizer import OptimizerConfig
from autoshard.train.step.preference import DpoConfig
from autoshard.train.step.train_step import BatchKind


@shown
@accepts_old_fields
@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run: model, data, optimizer, plan, evaluation and checkpoints."""

    preset: str = "quick"
    """Named settings to start from. The error for an unknown name lists the known ones."""
    config: Path | None = None
    """TOML file. Its settings override the preset's, and the command line overrides both."""
    run_dir: Path | None = None
    """Folder of the run: metrics, checkpoints, plot, sample. Default: a new folder, runs/PRESET-TIME."""
    resume: bool = False
    """Continue the run in --run-dir (default: the newest of this preset) from its last checkpoint."""
    resume_if_started: bool = False
    """Continue the run in --run-dir if it has started, and start it otherwise. One command line then starts a run and
    restarts it; `autoshard launch` adds this option."""
    max_failures: int = 3
    """With --resume-if-started: attempts in a row without a new checkpoint, after which the run is not started again; 0
    for no limit."""
    allow_other_data: bool = False
    """With --resume: continue even if the data differ from those that the run was trained on."""

    model: str = "gpt"
    """`gpt` (see --gpt.*), or package.module:factory. The factory is called with those of rngs, vocab and context
    that it accepts. It returns an nnx.Module that maps tokens [batch, seq] to logits, or that has a method
    loss(batch) which returns the sum of the losses and the sum of their weights."""
    data: str | None = None
    """UTF-8 file or folder (default: the Python standard library's source), or package.module:function. With --from,
    also rows of instruction data: .jsonl, .parquet, .array_record, or a folder of them. The function is called with the
    config. It returns (training tokens, held-out tokens) as integer arrays, or an
    autoshard.train.data.text_data.Source."""
    tokenizer: Path | None = None
    """`tokenizers` JSON file. Default: each byte is a token."""

    steps: int = 1000
    """Training steps of the run."""
    batch_size: int = 64
    """Sequences per step, over all devices and microbatches."""
    microbatches: int = 1
    """Microbatches per step. A batch is split into them and their gradients are accumulated. With a plan such as
    'pp:4', the stages work on them in turn, and 1 lets the planner choose their number."""
    seed: int = 0
    """Seed of the initial parameters, the batches and dropout."""
    freeze: tuple[str, ...] = ()
    """Globs over /-joined parameter paths, such as 'embed' 'blocks/*'. Matching parameters are not trained."""
    ema_decay: float = 0.0
    """Decay of the moving average of the parameters per update; 0 turns the average off."""
    ema_every: int = 1
    """Steps between updates of the moving average."""
    ema_spike: float = 2.0
    """The moving average skips a step whose loss exceeds this many times the recent mean loss; 0 turns this off.
    Steps with a non-finite loss are always skipped."""
    use_ema: bool = True
    """Evaluate and sample with the moving average, if there is one."""
    gpt: GPTConfig = field(default_factory=GPTConfig)
    """The built-in model. gpt.context is the sequence length for every model."""
    pretrained: PretrainedConfig = field(default_factory=PretrainedConfig)
    """The pretrained model that the run starts from."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters, which are trained in place of the pretrained parameters."""
    rows: RowsConfig = field(default_factory=RowsConfig)
    """How rows of instruction data become batches."""
    loss: Literal["tokens", "dpo"] = "tokens"
    """`tokens` is the cross-entropy of the tokens. `dpo` compares pairs of answers, rows with prompt, chosen and
    rejected, with --from; see --dpo.*."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    """How --loss dpo compares pairs of answers."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How parameters are updated."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What the run does after a step whose loss or gradient is not finite, or a spike."""

    plan: str | None = None
    """Plan to use, such as 'fsdp:8' or 'dp:2 tp:4'. Default: the planner chooses. A run that is resumed with fewer or
    more devices scales the plan that it was started with."""
    schedule: str | None = None
    """The order in which the stages of a pipeline work, such as zb or interleaved:2. Use it with a plan such as
    'pp:4 dp:2', or with neither plan nor mesh: the planner chooses the stages. Default: 1f1b if it fits."""
    mesh: str | None = None
    """Mesh to plan for, such as 'data=4,model=2'. Default: the planner chooses."""
    target: str | None = None
    """Machine to plan for, such as 'cpu:8' or 'h100:8'. Default: this machine."""
    memory_limit_bytes: int | None = None
    """Memory limit of the plan, in bytes per device. Default: the device's memory."""
    measure: int = 0
    """Candidate plans to time on the devices before training; the fastest is used. 0 uses the best estimate."""
    variants: Literal["given", "search"] = "given"
    """`given` uses --gpt.remat and --microbatches as they are; `search` lets the planner choose them. A resumed run
    keeps its choice."""
    offload: str = "none"
    """What waits in the host's memory, as words joined by + or commas. `optimizer` is the optimizer's state. Names such
    as residual+qkv are values of a layer, between forward and backward pass, and set --gpt.remat; residual@::2 selects
    every second layer. The error for an unknown name lists the known ones. `auto` lets the planner choose what layers
    keep, recompute and offload; `none` offloads nothing. With a model of your own or --from, the words are those of
    auto_shard's offload: names that the model gives with checkpoint_name, and others. A resumed run keeps its choice,
    but for `optimizer`, which may change."""
    compiler_options: str | None = None
    """Options for XLA, which take precedence over the planner's own: option sets and NAME=VALUE, joined by +, such as
    scoped-vmem+xla_tpu_host_transfer_overlap_limit=24. The error for an unknown set lists the known ones. A resumed run
    keeps them unless others are given."""
    gather: Literal["auto", "prefetch", "sequential", "once", "repeat"] = "auto"
    """The order in which stored parameters are gathered: `prefetch` gathers those that a layer needs first while the
    layer before it computes; `sequential` gathers one after another, so that at most two gathered ones are in memory;
    `auto` leaves it to the compiler, or is sequential if nothing else fits. In a pipeline, stages gather their layers
    `once` a step, or in each microbatch (`repeat`); `auto` takes the faster one that fits."""
    kernels: Literal["off", "auto", "require"] = "off"
    """Whether kernels take the place of attention that the model computes itself: `auto` replaces what is proven to be
    attention, `require` makes it an error if some is left. The built-in model has its own setting, --gpt.attention."""
    overlap: str | None = None
    """Which collectives of which parameters may run beside compute, as PATH:KIND=on|off separated by spaces, such as
    'experts/*:gather=off */wq:reduce=off'. The error for an unknown path or kind lists those that exist. Default: all
    that the compiler runs beside compute."""
    virtual_devices: int | None = None
    """Number of virtual devices that the CPU is split into."""

    profile: str | None = None
    """Steps of which a trace is recorded, such as 10 or 10:12: the first and the last one, as the log numbers them. The
    trace is in RUN/profile; `autoshard profile RUN` compares it with the plan. It applies to this attempt only."""
    log_every: int = 10
    """Steps between lines of metrics."""
    metrics: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: some of tensorboard, wandb, mlflow."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_batches: int = 0
    """Held-out batches per evaluation; 0 uses all. The evaluation at the end always uses all."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one only at the end."""
    checkpoint_minutes: float = 0.0
    """Minutes between checkpoints, in addition to --checkpoint-every; 0 turns this off."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_best: int = 0
    """Number of checkpoints with the smallest held-out loss to keep as well. Only evaluated steps count."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of this are never removed; 0 turns this off."""
    sample_tokens: int = 200
    """Tokens of text sampled at the end; 0 for none."""
    prompt: str = "\n"
    """Text that the sample continues."""
    prefetch: int = 2
    """Batches loaded onto the devices ahead of their use."""
    deadline_seconds: float = 900.0
    """With several processes: maximum time of a step, compilation included. After that the run reports which process
    seems to be lost, and exits with code 75, which tells launchers to start it again."""

    def __post_init__(self) -> None:
        """Refuse invalid values, and report all of them at once."""
        positive = ("batch_size", "microbatches", "log_every", "prefetch", "ema_every")
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1" for name in positive if getattr(self, name) < 1
        ]
        counts = (
            "steps seed eval_every eval_batches checkpoint_every sample_tokens keep_checkpoints keep_best keep_every "
            "measure checkpoint_minutes ema_spike max_failures"
        ).split()
        problems += [
            f"{name} is {getattr(self, name)}; it must not be negative"
            for name in counts
            if not getattr(self, name) >= 0
        ]
        if self.microbatches >= 1 and self.batch_size % self.microbatches:
            problems.append(f"batch_size {self.batch_size} does not divide into {self.microbatches} microbatches")
        if not self.deadline_seconds > 0:
            problems.append(f"deadline_seconds is {self.deadline_seconds}; it must be positive")
        if not 0 <= self.ema_decay < 1:
            problems.append(f"ema_decay is {self.ema_decay}; it must be at least 0 and below 1")
        if self.ema_decay and self.optimizer.name == "schedule_free":
            problems.append("ema_decay and schedule_free both average the parameters: leave out ema_decay")
        if self.allow_other_data and not self.resume:
            problems.append("allow_other_data is only for resumed runs: add --resume, or leave it out")
        if self.resume_if_started and self.run_dir is None:
            problems.append("resume_if_started needs the folder of the run: give run_dir")
        if self.sample_tokens and not self.prompt:
            problems.append("prompt is empty, but a sample continues it: give at least one character")
        if self.virtual_devices is not None and self.virtual_devices < 1:
            problems.append(f"virtual_devices is {self.virtual_devices}; it must be at least 1")
        try:
            read_schedule(self.schedule)
        except PlanError as error:
            problems.append(str(error))
        problems += offload_problems(self) + pretrained_problems(self) + profile_problems(self.profile, self.steps)
        if problems:
            raise ConfigError("; ".join(problems))

    @functools.cached_property
    def reads_rows(self) -> bool:
        """Whether the data are rows of instruction data."""
        return self.pretrained.folder is not None and self.data is not None and has_rows(self.data)

    @property
    def batch_kind(self) -> BatchKind:
        """What arrays a batch has."""
        return "pairs" if self.loss == "dpo" else "packed" if self.reads_rows else "text"

    @property
    def is_built_in(self) -> bool:
        """Whether the model is the built-in one."""
        return self.model_name == "gpt"

    @property
    def model_name(self) -> str:
        """The name of the model: `gpt`, `pretrained`, or that of its factory."""
        return self.model if self.pretrained.folder is None else "pretrained"

    @property
    def model_folder(self) -> Path | None:
        """The folder that describes the pretrained model: the run's copy, which has no weights, or the original."""
        if self.pretrained.folder is None or self.run_dir is None:
            return self.pretrained.folder
        kept = self.run_dir / run_directory.PRETRAINED
        return kept if kept.is_dir() else self.pretrained.folder

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer's file: that of `tokenizer`, or of the pretrained model; None if tokens are bytes."""
        if self.tokenizer is not None or self.model_folder is None:
            return self.tokenizer
        file = self.model_folder / "tokenizer.json"
        return file if file.is_file() else None

    @property
    def stages(self) -> int:
        """Stages of the pipeline that the plan asks for; 1 without one.

        Raises:
            PlanRequestError: The plan has an unknown word.
        """
        return stages_of(self.plan)

    @property
    def searches_variants(self) -> bool:
        """Whether the planner chooses the remat policy, alone or with the number of microbatches."""
        return self.variants == "search" or (self.offload == AUTO and self.is_built_in)

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch."""
        return self.batch_size // self.microbatches

    @property
    def eval_batch_size(self) -> int:
        """Sequences per evaluation batch: a microbatch, or with a pipeline, which needs several, a whole batch."""
        return self.batch_size if self.stages > 1 else self.microbatch_size

    @property
    def accumulation(self) -> int:
        """Old name of `microbatches`."""
        warnings.warn(
            "TrainConfig.accumulation is now TrainConfig.microbatches; the old name is removed in 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.microbatches
