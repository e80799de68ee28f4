"""Write the page of a run."""

from __future__ import annotations

from pathlib import Path

from autoshard._html.document import document, sections
from autoshard.errors import ConfigError
from autoshard.sharding.report.page.script import SCRIPT as PLAN_SCRIPT
from autoshard.train.report import script
from autoshard.train.report.curves import (
    loss_section,
    marks_of,
    memory_section,
    optimizer_section,
    other_section,
    throughput_section,
)
from autoshard.train.report.headline import headline
from autoshard.train.report.history import checkpoints_section, goodput_section, history_section
from autoshard.train.report.plan_section import plan_section
from autoshard.train.report.run_files import Run, folder_of, read_run
from autoshard.train.report.settings import settings_section
from autoshard.train.report.style import STYLE

REPORT = "report.html"


def write_report(place: str | Path, out: str | Path | None = None) -> str:
    """Write the page of a run and return the file's name. Nothing else in the run's folder is changed.

    Args:
        place: Folder of the run, or a URL such as `gs://bucket/run`.
        out: The file to write; by default `report.html` in the folder of the run.

    Raises:
        ConfigError: The folder is not that of a run, or the file cannot be written.
    """
    page = run_page(read_run(place))
    file = folder_of(place) / REPORT if out is None else folder_of(out)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {str(file)!r} cannot be written ({error.strerror or error}): give another file"
        ) from error
    return str(file)


def run_page(run: Run) -> str:
    """Return the HTML of the page."""
    plan, style = plan_section(run)
    marks = "Dashed lines: an attempt continued from there, or in red, an incident. " if marks_of(run) else ""
    parts = [
        ("loss", "Loss", loss_section(run), marks + "Point at a chart for the values of a step."),
        ("optimizer", "Learning rate and gradient norm", optimizer_section(run), ""),
        ("throughput", "Throughput", throughput_section(run),
         "Without evaluations and saves. A record is the mean since the record before it."),
        ("memory-measured", "Memory", memory_section(run), "As the devices report it."),
        ("other", "Other metrics", other_section(run), ""),
        ("goodput", "Where the time went", goodput_section(run), ""),
        ("history", "Attempts and incidents", history_section(run), ""),
        ("checkpoints", "Checkpoints", checkpoints_section(run), ""),
        ("plan", "Plan", plan, ""),
        ("settings", "Settings", settings_section(run), ""),
    ]  # fmt: skip
    body = headline(run) + sections(parts)
    return document(f"Run: {run.place}", STYLE + style, body, [script.SCRIPT, PLAN_SCRIPT])
