"""What the argument parsers of subcommands have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn

from autoshard.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that raises our error instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, in our own words where we have some."""
        from autoshard.train.options import in_our_words

        raise ConfigError(in_our_words(message))


def parser(command: str, summary: str, example: str) -> Parser:
    """A parser for a subcommand, whose help ends with an example."""
    return Parser(
        prog=f"autoshard {command}",
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
