"""Report a run: a progress bar, JSON lines, and other writers of metrics. Only the main process reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from autoshard.train.config import run_directory
from autoshard.train.run.metric_writers import open_writers


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
        """Open the metrics files, and drop the lines of steps after `start`.

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
        self._steps, self._per = steps, per
        if not enabled:
            return
        path = run_dir / run_directory.METRICS
        kept = [line for line in read_metrics(path) if line["step"] <= start]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self._lines = path.open("a", buffering=1)
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
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Stop the progress bar and close the files."""
        if self.enabled and not self._lines.closed:
            self._bar.stop()
            self._lines.close()
            for writer in self._writers:
                writer.close()


def _figures(values: Mapping[str, float], per: str) -> str:
    """Format metrics as a short text; the loss is one per `per`."""
    formats = {
        "loss": "loss {:.4f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
        "eta_seconds": "ETA {:.0f} s",
        "val_loss": f"validation loss {{:.4f}} nats per {per}",
        "val_bits_per_byte": "{:.4f} bits per byte",
    }
    shown = {name: value for name, value in values.items() if name != "eta_seconds" or value > 0}
    return "  ".join(text.format(shown[name]) for name, text in formats.items() if name in shown)
