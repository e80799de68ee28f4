"""Only the process that reports writes metrics."""

from pathlib import Path

import pytest

from autoshard.train.config import run_directory
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
