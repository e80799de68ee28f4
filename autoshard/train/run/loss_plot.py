"""Plot the loss of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_loss(metrics: Sequence[dict[str, Any]], path: Path, per: str = "token") -> None:
    """Plot training loss (raw and smoothed) and validation loss over steps, in nats.

    Args:
        metrics: Lines of a metrics file.
        path: PNG file to write.
        per: what the loss is a mean over.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel=f"loss (nats per {per})")
    train = [(line["step"], line["loss"]) for line in metrics if line.get("loss") is not None]
    validation = [(line["step"], line["val_loss"]) for line in metrics if line.get("val_loss") is not None]
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, _smoothed(losses), color="tab:blue", label="training (smoothed)")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", label="validation")
    if train or validation:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Average each value over a centred window of a twentieth of the run. The width is chosen, not measured."""
    half = len(values) // 40
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
