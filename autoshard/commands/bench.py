"""`autoshard bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig
from autoshard.train.options import parse_config

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
    config = parse_config(arguments, BenchCommand, "autoshard bench", _DESCRIPTION)
    if config.rounds < 1:
        raise ConfigError(f"--rounds is {config.rounds}, it must be at least 1")
    from autoshard.commands.train import names_virtual_devices
    from autoshard.train.distributed import set_virtual_devices

    set_virtual_devices(config.virtual_devices, explicit=names_virtual_devices(arguments))
    from autoshard.train.timing import time_steps

    print(time_steps(config, config.rounds))
    return 0
