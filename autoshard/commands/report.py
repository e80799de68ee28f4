"""`autoshard report`: write the HTML page of a run."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.commands.arguments import parser


def run(arguments: Sequence[str]) -> int:
    """Write the page of a run; see `autoshard report --help`."""
    options = parser(
        "report",
        "Write one HTML page of a run: its curves, its time by cause, attempts, checkpoints, plan and settings. The "
        "run may be in progress. The page makes no request to the network.",
        "autoshard report runs/mine --out mine.html",
    )
    options.add_argument("run", metavar="RUN", help="folder of the run, or a URL such as gs://bucket/run")
    options.add_argument("--out", metavar="FILE", help="file to write (default: report.html in the folder of the run)")
    given = options.parse_args(arguments)
    from autoshard.train.report.page import write_report

    print(f"wrote {write_report(given.run, given.out)}")
    return 0
