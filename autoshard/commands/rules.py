"""`autoshard rules`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from autoshard.commands.arguments import Parser, parser
from autoshard.errors import ConfigError

_EXAMPLES = """autoshard rules dot_general
         autoshard rules --operators layer_norm
         autoshard rules --coverage train:example   # example() returns (train_step, (state, batch))

exit codes: 0; with --coverage, 1 where a primitive has no rule; 2 where the command was used wrongly"""


def run(arguments: Sequence[str]) -> int:
    """List the rules; see `autoshard rules --help`."""
    given = _parser().parse_args(arguments)
    if given.coverage:
        return _coverage(given)
    from autoshard.commands import rules_pages

    found = rules_pages.find(given.name or "", operators=given.operators, everything=given.json or given.markdown)
    if not found:
        raise ConfigError(f"nothing's name or family contains {given.name!r}: `autoshard rules` lists primitives, "
                          "`autoshard rules --operators` named operators")  # fmt: skip
    if given.json:
        print(found.to_json())
    elif given.markdown:
        print(found.to_markdown(), end="")
    else:
        found.print_tables()
    return 0


def _parser() -> Parser:
    options = parser(
        "rules",
        "List what is known about each operator: how the sharding of its operands passes through it.",
        _EXAMPLES,
    )
    options.add_argument("name", nargs="?", help="show only operators and families whose name contains this")
    options.add_argument("--operators", action="store_true",
                         help="named operators and their gradients, with the rules derived from their primitives "
                         "(takes a minute)")  # fmt: skip
    form = options.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print primitives and named operators as JSON")
    form.add_argument("--markdown", action="store_true", help="print them as Markdown; docs/rules.md is this")
    form.add_argument("--coverage", metavar="MODULE:FUNCTION",
                      help="say which primitives of a function have no rule; FUNCTION takes no arguments and returns "
                      "(fn, args), args being arrays or shapes; the working directory is searched first")  # fmt: skip
    return options


def _coverage(given: argparse.Namespace) -> int:
    if given.name or given.operators:
        raise ConfigError("--coverage goes alone: it lists the primitives of one function")
    from autoshard.commands.rules_coverage import coverage_of

    found = coverage_of(given.coverage)
    print(found)
    return 1 if found.missing else 0
