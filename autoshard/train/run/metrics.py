"""Report a run: a progress bar, JSON lines, and other writers of metrics. Only the main process reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from autoshard._units import bytes_text, duration_text
from autoshard.train.config import run_directory
from autoshard.train.run.device_memory import MEASURED, PREDICTED
from autoshard.train.run.metric_writers import open_writers

INCIDENT = "incident"  # the field that records of bad steps have


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, without one that a crash left incomplete."""
    return run_directory.read_lines(path)


class Reporter:
    """Print and record the progress of a run.

    If `enabled` is false, as in all processes except the main one, every method does nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        steps: int,
        start: int,
        enabled: bool,
        per: str = "token",
        writers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the metrics files, and drop the lines of steps after `start`, except incidents.

        Args:
            run_dir: Folder of the run.
            steps: Steps of the run.
            start: Step that the run continues from. Later steps were lost in a crash, and their metrics are dropped.
            enabled: Whether this process reports.
            per: What the loss is a mean over.
            writers: Names of further writers of metrics; see `open_writers`.
            settings: Settings of the run, for writers that record them.
        """
        self.enabled = enabled
        self.run_dir = run_dir
        self._steps, self._per = steps, per
        if not enabled:
            return
        self._open(start)
        self._writers = open_writers(writers, run_dir, settings or {}, start)
        self._console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=start, figures="")

    def _open(self, start: int) -> None:
        path = self.run_dir / run_directory.METRICS
        kept = [line for line in read_metrics(path) if line["step"] <= start or INCIDENT in line]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(map(_json_line, kept)))
        temporary.replace(path)
        self._lines = path.open("a", buffering=1)

    def rewind(self, step: int) -> None:
        """Drop the metrics of the steps after `step`, which the run trains again. Incidents stay."""
        if self.enabled:
            self._lines.close()
            self._open(step)
            for writer in self._writers:
                writer.rewind(step)
            self._bar.update(self._task, completed=step)

    def incident(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a record of a bad step to the JSON lines."""
        if self.enabled:
            self._lines.write(_json_line({"step": step, **values}))

    def print(self, text: str) -> None:
        """Print a text without markup."""
        if self.enabled:
            self._console.print(Text(text), soft_wrap=True)

    def start(self) -> None:
        """Show the progress bar."""
        if self.enabled:
            self._bar.start()

    def advance(self, step: int) -> None:
        """Advance the progress bar to a step."""
        if self.enabled:
            self._bar.update(self._task, completed=step)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step to the files, and show them."""
        if not self.enabled:
            return
        self.write(step, values)
        figures = _figures(values, self._per)
        self._bar.update(self._task, completed=step, figures=figures)
        if "val_loss" in values or not self._console.is_terminal:
            self.print(f"step {step}/{self._steps}  {figures}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step to the files, and show nothing."""
        if not self.enabled:
            return
        self._lines.write(_json_line({"step": step, **values}))
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Stop the progress bar and close the files."""
        if self.enabled and not self._lines.closed:
            self._bar.stop()
            self._lines.close()
            for writer in self._writers:
                writer.close()


def _json_line(record: Mapping[str, Any]) -> str:
    """Format a record as a line of JSON. JSON has no numbers that are not finite: they become null."""
    gone = {name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({name: None if name in gone else value for name, value in record.items()}) + "\n"


def _figures(values: Mapping[str, float], per: str) -> str:
    """Format metrics as a short text; the loss is one per `per`."""
    formats = {
        "loss": "loss {:.4f}",
        "skipped_steps": "{:.0f} skipped",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        MEASURED: "memory {}",
        PREDICTED: "memory {} (predicted)",
        "eta_seconds": "ETA {}",
        "val_loss": f"validation loss {{:.4f}} nats per {per}",
        "val_bits_per_byte": "{:.4f} bits per byte",
    }
    shown: dict[str, float | str] = dict(values)
    shown |= {name: bytes_text(values[name]) for name in (MEASURED, PREDICTED) if name in values}
    shown |= {"eta_seconds": duration_text(values["eta_seconds"])} if "eta_seconds" in values else {}
    for name in ("eta_seconds", "skipped_steps"):
        if values.get(name) == 0:
            del shown[name]
    return "  ".join(text.format(shown[name]) for name, text in formats.items() if name in shown)
