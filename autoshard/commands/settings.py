"""Read the settings of a run, for the subcommands that accept them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from autoshard.train.config.command_line import Command, parse_config
from autoshard.train.run.distributed import set_virtual_devices


def read_settings(arguments: Sequence[str], kind: type[Command], command: str, description: str) -> Command:
    """Parse a subcommand's arguments into a config, and split the CPU into the virtual devices that it requests.

    Args:
        arguments: The arguments after the subcommand.
        kind: `TrainConfig`, or a subclass with additional options.
        command: Name of the subcommand.
        description: First paragraph of its help.

    Raises:
        ConfigError: An option is unknown or has an invalid value.
    """
    config = parse_config(arguments, kind, f"autoshard {command}", description)
    named = any(argument.replace("_", "-").startswith("--virtual-devices") for argument in arguments)
    set_virtual_devices(config.virtual_devices, explicit=named)
    if config.resume:
        from autoshard.train.run.resumption import with_newer_request

        config = cast(Command, with_newer_request(config))
    return config
