"""What the argument parsers of subcommands have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from autoshard.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that raises our error instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `ConfigError`, in plain words."""
        from autoshard.train.config.command_line import plain_message

        raise ConfigError(plain_message(message))


def parser(command: str, summary: str, example: str) -> Parser:
    """A parser for a subcommand, whose help ends with an example."""
    return Parser(
        prog=f"autoshard {command}",
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def check_writable(option: str, path: Path | None) -> None:
    """Checks, before the work, that what an option names can be written; the file is left as it is.

    Raises:
        ConfigError: it cannot.
    """
    try:
        if path is None or (path.exists() and not (path.is_file() or path.is_dir())):  # pipes and devices are not tried
            return
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except (OSError, ValueError) as error:  # a zero byte in a name is a ValueError
        raise cannot_write(option, path, error) from error


def cannot_write(option: str, path: Path | None, error: Exception) -> ConfigError:
    """The error of an option whose file cannot be written."""
    return ConfigError(f"{option} {str(path)!r} cannot be written: {getattr(error, 'strerror', None) or error}")
