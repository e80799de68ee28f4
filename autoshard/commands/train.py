"""`autoshard train`."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.commands.settings import read_settings
from autoshard.train.config import TrainConfig

_DESCRIPTION = """Train a model on text, under a plan.

example: autoshard train --preset quick --data FILE.txt --steps 500 --plan fsdp:8 --run-dir runs/mine

Settings come from --preset, then --config FILE.toml, then the options."""


def run(arguments: Sequence[str]) -> int:
    """Train; see `autoshard train --help`."""
    config = read_settings(arguments, TrainConfig, "train", _DESCRIPTION)
    from autoshard.train.loop import train

    train(config)
    return 0
