"""Argument parsing that the subcommands share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Literal, NoReturn

from autoshard._shown import shown
from autoshard.errors import ConfigError

AUTO, SCHEDULE = "auto", "schedule"


@shown
class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `ConfigError`, in plain words."""
        from autoshard.train.config.command_line import plain_message

        raise ConfigError(plain_message(message, self._command))

    def parse_known_args(self, *args: Any, **keywords: Any) -> Any:
        """Parse all arguments: an unknown one is an error, here and in the parser of an action.

        Raises:
            ConfigError: An argument is unknown, missing or invalid.
        """
        given, unknown = super().parse_known_args(*args, **keywords)
        if unknown:
            from autoshard.train.config.command_line import unknown_arguments

            raise ConfigError(unknown_arguments(unknown, self._options, self._command))
        return given, unknown

    @property
    def _command(self) -> str:
        """The command without names of arguments: `autoshard plan`, `autoshard ckpt ls`."""
        return " ".join(word for word in self.prog.split() if word.islower())

    @property
    def _options(self) -> list[str]:
        return re.findall(r"--[a-z][\w-]*", self.format_usage())


def parser(command: str, summary: str, example: str) -> Parser:
    """Make the parser of a subcommand; its help ends with an example."""
    return Parser(
        prog=f"autoshard {command}",
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def auto_or_number(text: str) -> int | Literal["auto"]:
    """Parse the value of an option that is a number or `auto`.

    Raises:
        argparse.ArgumentTypeError: The text is neither.
    """
    return AUTO if text == AUTO else _number(text, "neither auto nor a number")


def verification_or_number(text: str) -> int | Literal["auto", "schedule"]:
    """Parse the value of `--verify`: a number, `auto` or `schedule`.

    Raises:
        argparse.ArgumentTypeError: The text is none of them.
    """
    if text in (AUTO, SCHEDULE):
        return AUTO if text == AUTO else SCHEDULE
    return _number(text, "neither auto, nor schedule, nor a number")


def _number(text: str, otherwise: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is {otherwise}") from None


def check_writable(option: str, path: Path | None) -> None:
    """Check that an option's output file can be written, before the work starts. The file is not changed.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        if path is None or (path.exists() and not (path.is_file() or path.is_dir())):  # skip pipes and devices
            return
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:  # a null byte in a name raises ValueError
        raise cannot_write(option, path, error) from error


def cannot_write(option: str, path: Path | None, error: Exception) -> ConfigError:
    """Make the error for an option whose file cannot be written."""
    return ConfigError(f"{option} {str(path)!r} cannot be written: {getattr(error, 'strerror', None) or error}")
