"""`autoshard profile`: compare the trace of a run with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoshard.commands.arguments import parser


def run(arguments: Sequence[str]) -> int:
    """Compare the trace of a run with its plan; see `autoshard profile --help`."""
    options = parser(
        "profile",
        "Compare the newest trace of a run with its plan: predicted and measured time of compute, of each kind of "
        "collective, of each module and of each collective. `autoshard train --profile STEPS` records a trace.",
        "autoshard profile runs/mine",
    )
    options.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    options.add_argument("--json", action="store_true", help="print JSON")
    given = options.parse_args(arguments)
    from rich.console import Console

    from autoshard.train.profile.comparison import compare_trace
    from autoshard.train.profile.tables import print_comparison

    found = compare_trace(given.run)
    if given.json:
        print(found.to_json())
    else:
        console = Console(highlight=False)
        print_comparison(found, console if console.is_terminal else Console(highlight=False, width=140))
    return 0
