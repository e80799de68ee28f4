"""`autoshard bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autoshard.commands.settings import read_settings
from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig

_DESCRIPTION = """Time the train step that `autoshard train` would run with the same options: under its plan, and as the
same function under jax.jit with the plan's input shardings written by hand. Both are timed in turn, in one process.

example: autoshard bench --preset quick --plan fsdp:8 --rounds 20

Made of random tokens: no data is read."""


@dataclasses.dataclass(frozen=True)
class BenchCommand(TrainConfig):
    """The settings of a run, and how long it is timed."""

    rounds: int = 20
    """Pairs of steps that are timed, after one that is not."""


def run(arguments: Sequence[str]) -> int:
    """Time; see `autoshard bench --help`."""
    config = read_settings(arguments, BenchCommand, "bench", _DESCRIPTION)
    if config.rounds < 1:
        raise ConfigError(f"--rounds is {config.rounds}, it must be at least 1")
    from autoshard.train.timing import time_steps

    print(time_steps(config, config.rounds))
    return 0
