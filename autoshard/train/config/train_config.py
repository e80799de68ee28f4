"""The trainer's settings: typed, from a preset, a TOML file and the command line, the later ones first."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from autoshard._shown import shown
from autoshard._typed import fit
from autoshard.errors import ConfigError
from autoshard.models import GPTConfig
from autoshard.train.step.optimizer import OptimizerConfig

RESUMABLE_CHANGES = frozenset(
    "preset config run_dir resume steps mesh target memory_limit_bytes plan measure variants virtual_devices log_every "
    "eval_every eval_batches checkpoint_every checkpoint_minutes keep_checkpoints keep_best keep_every sample_tokens "
    "prompt prefetch use_ema deadline_seconds allow_other_data".split()
)
"""Settings that may differ between a run and its resumption; all others say what is trained, and on what."""


@shown
@dataclass(frozen=True)
class TrainConfig:
    """What is trained, on what, how, where, and what is kept of it."""

    preset: str = "quick"
    """Named settings to start from; unknown names list the known ones."""
    config: Path | None = None
    """TOML file whose settings replace the preset's; the command line replaces both."""
    run_dir: Path | None = None
    """Folder of the run: metrics, checkpoints, plot, sample. Default: a new one, runs/PRESET-TIME."""
    resume: bool = False
    """Continue the run in --run-dir (default: the newest of this preset) from its last checkpoint."""
    allow_other_data: bool = False
    """With --resume: go on although the data are not those that the run was trained on."""

    model: str = "gpt"
    """`gpt` (see --gpt.*), or package.module:factory. It is called with those of rngs, vocab and context that
    it takes, and returns an nnx.Module that maps tokens [batch, seq] to logits, or has a method loss(batch)
    that returns the sum of losses and its weight."""
    data: str | None = None
    """UTF-8 file or folder (default: the Python standard library's source), or package.module:function. It is
    called with the config and returns (training tokens, held-out tokens) as integer arrays, or an
    autoshard.train.data.text_data.Source."""
    tokenizer: Path | None = None
    """`tokenizers` JSON file. Default: a token is a byte."""

    steps: int = 1000
    """Length of the run."""
    batch_size: int = 64
    """Sequences in a step, over all devices and microbatches."""
    accumulation: int = 1
    """Microbatches that a step's batch is processed in, one after the other."""
    seed: int = 0
    """Decides initial parameters, batches and dropout."""
    freeze: tuple[str, ...] = ()
    """Globs over /-joined parameter paths, such as 'embed' 'blocks/*': these parameters are not trained."""
    ema_decay: float = 0.0
    """Decay of a moving average of the parameters; 0 for none."""
    ema_every: int = 1
    """Steps between updates of the moving average."""
    ema_spike: float = 2.0
    """The moving average leaves out a step whose loss is more than so many times its recent mean; 0 for none such.
    One whose loss is not finite is always left out."""
    use_ema: bool = True
    """Evaluate and sample the moving average, where there is one."""
    gpt: GPTConfig = field(default_factory=GPTConfig)
    """The built-in model. gpt.context is the length of sequences for any model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How parameters are updated."""

    plan: str | None = None
    """Plan to use, such as 'fsdp:8' or 'dp:2 tp:4'. Default: the planner chooses."""
    mesh: str | None = None
    """Mesh to plan for, such as 'data=4,model=2'. Default: the planner chooses."""
    target: str | None = None
    """Machine to plan for, such as 'cpu:8' or 'h100:8'. Default: this one."""
    memory_limit_bytes: int | None = None
    """Memory that the plan may use on each device. Default: what the device has."""
    measure: int = 0
    """Plans to run for some steps before the first, to take the fastest; 0 takes the best by the estimate."""
    variants: Literal["given", "search"] = "given"
    """Whether --gpt.remat and --accumulation are as given, or the planner chooses them too. A run that is resumed
    keeps what it has."""
    virtual_devices: int | None = None
    """Number of virtual devices that the CPU is split into."""

    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_batches: int = 0
    """Held-out batches of the evaluations before the last one; 0 for all. The last one always takes all."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    checkpoint_minutes: float = 0.0
    """Minutes after which a checkpoint is written, whatever the step; 0 for no such rule."""
    keep_checkpoints: int = 3
    """Newest checkpoints kept; 0 for all."""
    keep_best: int = 0
    """Checkpoints kept beside them: those of the smallest held-out loss, of steps that were evaluated."""
    keep_every: int = 0
    """Checkpoints kept for ever: of steps that this divides; 0 for none."""
    sample_tokens: int = 200
    """Tokens of text sampled at the end; 0 for none."""
    prompt: str = "\n"
    """Text that the sample continues."""
    prefetch: int = 2
    """Batches put on the devices ahead of their use."""
    deadline_seconds: float = 900.0
    """Of several processes: time that a step may take, its compilation too, before the run takes another process for
    lost, says which, and exits with code 75, by which launchers know to start it again."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be used, all at once."""
        positive = ("batch_size", "accumulation", "log_every", "prefetch", "ema_every")
        problems = [
            f"{name} is {getattr(self, name)}, it must be at least 1" for name in positive if getattr(self, name) < 1
        ]
        counts = (
            "steps",
            "seed",
            "eval_every",
            "eval_batches",
            "checkpoint_every",
            "sample_tokens",
            "keep_checkpoints",
            "keep_best",
            "keep_every",
            "measure",
            "checkpoint_minutes",
            "ema_spike",
        )
        problems += [
            f"{name} is {getattr(self, name)}, it must not be negative"
            for name in counts
            if not getattr(self, name) >= 0
        ]
        if self.accumulation >= 1 and self.batch_size % self.accumulation:
            problems.append(f"batch_size {self.batch_size} does not divide into accumulation {self.accumulation}")
        if not self.deadline_seconds > 0:
            problems.append(f"deadline_seconds is {self.deadline_seconds}, it must be positive")
        if not 0 <= self.ema_decay < 1:
            problems.append(f"ema_decay is {self.ema_decay}, it must be at least 0 and below 1")
        if self.allow_other_data and not self.resume:
            problems.append("allow_other_data is for a run that goes on: give --resume, or leave it out")
        if self.sample_tokens and not self.prompt:
            problems.append("prompt is empty, and a sample continues it: give at least one character")
        if self.virtual_devices is not None and self.virtual_devices < 1:
            problems.append(f"virtual_devices is {self.virtual_devices}, it must be at least 1")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def microbatch_size(self) -> int:
        """Sequences in a microbatch; evaluation batches have this size too."""
        return self.batch_size // self.accumulation


def merge(config: Any, changes: Mapping[str, Any], where: str) -> Any:
    """A config with some settings replaced, nested tables included.

    Args:
        config: A config dataclass.
        changes: Setting to value, as TOML and JSON have them.
        where: Names the place that the changes come from, for errors.

    Raises:
        ConfigError: An unknown setting, or a value that does not fit it.
    """
    known = [entry.name for entry in dataclasses.fields(config)]
    types = get_type_hints(type(config))
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}{near(name, known)}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {name} is a table of settings, not {value!r}: write [{name}]")
            values[name] = merge(current, value, f"{where}: [{name}]")
        else:
            values[name] = fit(value, types[name], name, problems)
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return replaced(config, where, **values)


def replaced(config: Any, where: str, /, **values: Any) -> Any:
    """`dataclasses.replace` whose complaints say where the values come from."""
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def near(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the near ones, or else all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=3)
    return f": did you mean {' or '.join(close)}?" if close else f": known are {', '.join(known)}"


def load_toml(config: TrainConfig, path: Path) -> TrainConfig:
    """A config with the settings of a TOML file.

    Raises:
        ConfigError: The file is missing, is not TOML, or has an unknown setting.
    """
    try:
        changes = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} is not a TOML file: {error}") from error
    return merge(config, changes, str(path))


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_dict(values: Mapping[str, Any], where: str) -> TrainConfig:
    """The config that `to_dict` wrote."""
    return merge(TrainConfig(), values, where)


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that a run and its resumption must share."""
    return {name: value for name, value in to_dict(config).items() if name not in RESUMABLE_CHANGES}


def checkpoint_config(config: TrainConfig) -> dict[str, Any]:
    """What is kept with a checkpoint: the section `model` must agree when it is read, `run` is for people."""
    values = identity(config)
    return {"model": {"name": values["model"], **values["gpt"]}, "run": values}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Each setting that two configs disagree about, as `name: a, now b`."""
    found = []
    for name in sorted({*one, *other}):
        a, b = one.get(name), other.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name}: {a!r}, now {b!r}")
    return found
