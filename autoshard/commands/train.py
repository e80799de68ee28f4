"""`autoshard train`."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.train.config import TrainConfig
from autoshard.train.distributed import set_virtual_devices
from autoshard.train.options import parse_config

_DESCRIPTION = """Train a model on text, under a plan.

example: autoshard train --preset quick --data FILE.txt --steps 500 --plan fsdp:8 --run-dir runs/mine

Settings come from --preset, then --config FILE.toml, then the options."""


def run(arguments: Sequence[str]) -> int:
    """Train; see `autoshard train --help`."""
    config = parse_config(arguments, TrainConfig, "autoshard train", _DESCRIPTION)
    set_virtual_devices(config.virtual_devices, explicit=names_virtual_devices(arguments))
    from autoshard.train.loop import train

    train(config)
    return 0


def names_virtual_devices(arguments: Sequence[str]) -> bool:
    """Whether the number of virtual devices is given on the command line."""
    return any(argument.replace("_", "-").startswith("--virtual-devices") for argument in arguments)
