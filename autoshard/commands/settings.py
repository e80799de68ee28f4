"""What the subcommands that take the settings of a run have in common."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.train.config.command_line import Command, parse_config
from autoshard.train.run.distributed import set_virtual_devices


def read_settings(arguments: Sequence[str], kind: type[Command], command: str, description: str) -> Command:
    """The config that a subcommand's arguments ask for; the CPU is split into as many devices as it says.

    Args:
        arguments: What follows the subcommand.
        kind: `TrainConfig`, or a subclass with options of its own.
        command: The subcommand.
        description: What its help says first.

    Raises:
        ConfigError: Something in the arguments that cannot be used.
    """
    config = parse_config(arguments, kind, f"autoshard {command}", description)
    named = any(argument.replace("_", "-").startswith("--virtual-devices") for argument in arguments)
    set_virtual_devices(config.virtual_devices, explicit=named)
    return config
