"""`autoshard rules`: list rules and named operators, and the primitives of a function that have no rule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from autoshard.commands.arguments import Parser, parser
from autoshard.errors import ConfigError

_EXAMPLES = """autoshard rules dot_general
         autoshard rules --operators layer_norm
         autoshard rules --coverage train:example   # example() returns (train_step, (state, batch))

exit codes: 0 for success; 1 with --coverage if a primitive has no rule; 2 for wrong arguments"""


def run(arguments: Sequence[str]) -> int:
    """List rules; see `autoshard rules --help`."""
    given = _parser().parse_args(arguments)
    if given.coverage:
        return _coverage(given)
    from autoshard.commands import rules_pages

    found = rules_pages.find(given.name or "", operators=given.operators, everything=given.json or given.markdown)
    if not found:
        similar = rules_pages.similar(given.name)
        raise ConfigError(
            f"no operator or family has a name that contains {given.name!r}"
            + (f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ":")
            + " `autoshard rules` lists the primitives, `autoshard rules --operators` the named operators"
        )
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
        "List the sharding rule of each operator: how the sharding of its operands determines that of its results.",
        _EXAMPLES,
    )
    options.add_argument("name", nargs="?", help="show only operators and families whose name contains this text")
    options.add_argument("--operators", action="store_true",
                         help="list named operators and their gradients, with rules derived from their primitives "
                         "(takes a minute)")  # fmt: skip
    form = options.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print primitives and named operators as JSON")
    form.add_argument("--markdown", action="store_true", help="print both as Markdown; docs/rules.md is this output")
    form.add_argument("--coverage", metavar="MODULE:FUNCTION",
                      help="list the primitives of a function that have no rule. FUNCTION takes no arguments and "
                      "returns (fn, args), where args are arrays or shapes. The working directory is searched "
                      "first.")  # fmt: skip
    return options


def _coverage(given: argparse.Namespace) -> int:
    if given.name or given.operators:
        raise ConfigError("--coverage cannot be combined with a name or --operators: it checks one function")
    from autoshard.commands.rules_coverage import coverage_of

    found = coverage_of(given.coverage)
    print(found)
    return 1 if found.missing else 0
