"""Only the process that reports writes metrics."""

import json
from pathlib import Path

import pytest

from autoshard._units import duration_text
from autoshard.train.config import run_directory
from autoshard.train.run.loss_plot import plot_loss
from autoshard.train.run.metrics import Reporter, read_metrics


@pytest.mark.parametrize("enabled", [True, False])
def test_only_the_process_that_reports_writes(tmp_path: Path, capsys: pytest.CaptureFixture, enabled: bool) -> None:
    reporter = Reporter(tmp_path, steps=4, start=0, enabled=enabled)
    reporter.start()
    reporter.print("a plan")
    reporter.record(1, {"loss": 2.5})
    reporter.advance(2)
    reporter.record(4, {"loss": 2.0, "tokens_per_second": 1000.0, "eta_seconds": 0.0})  # no time is left
    reporter.close()
    reporter.close()  # a second time is harmless
    assert capsys.readouterr().out.splitlines() == (
        ["a plan", "step 1/4  loss 2.5000", "step 4/4  loss 2.0000  1,000 tokens/s"] if enabled else []
    )
    last = {"step": 4, "loss": 2.0, "tokens_per_second": 1000.0, "eta_seconds": 0.0}
    lines = [{"step": 1, "loss": 2.5}, last] if enabled else []
    assert read_metrics(tmp_path / run_directory.METRICS) == lines
    assert any(tmp_path.iterdir()) == enabled


def test_a_line_has_the_memory_and_the_skipped_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    reporter = Reporter(tmp_path, steps=4, start=0, enabled=True)
    reporter.record(1, {"loss": 2.5, "skipped_steps": 0, "mfu": 0.5, "memory_bytes": 3 * 2**30, "eta_seconds": 90.0})
    reporter.record(2, {"loss": 2.5, "skipped_steps": 2, "predicted_memory_bytes": 2**20})
    reporter.incident(3, {"incident": "rollback", "why": "the loss is nan", "leaf": "w"})
    reporter.rewind(1)
    reporter.close()
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/4  loss 2.5000  MFU 50.0%  memory 3.00 GiB  ETA {duration_text(90.0)}",
        "step 2/4  loss 2.5000  2 skipped  memory 1.00 MiB (predicted)",
    ]
    assert [line["step"] for line in read_metrics(tmp_path / run_directory.METRICS)] == [1, 3]


def test_every_line_is_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """JSON has no numbers that are not finite. Lines of an older version, which have them, are written again."""
    path = tmp_path / run_directory.METRICS
    path.write_text('{"step": 1, "val_loss": NaN}\n')
    reporter = Reporter(tmp_path, steps=4, start=1, enabled=True)
    reporter.record(2, {"val_loss": float("nan"), "loss": 2.0})
    reporter.incident(3, {"incident": "skip", "norm": float("inf")})
    reporter.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "val_loss": None},
        {"step": 2, "val_loss": None, "loss": 2.0},
        {"step": 3, "incident": "skip", "norm": None},
    ]
    assert "validation loss nan" in capsys.readouterr().out
    plot_loss(lines, tmp_path / "loss.png")
