"""Rates of a run: they cover the steps between two calls, without pauses and compilation."""

import time

import pytest

from autoshard.train.run.throughput import Clock


def test_rates_cover_the_steps_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(tokens_per_step=64, peak_seconds_per_step=0.5)
    now[0] += 50.0  # compilation
    assert clock.rates(3, 20) == {}
    now[0] += 6.0
    with clock.paused():
        now[0] += 1000.0
    now[0] += 2.0
    assert clock.rates(7, 20) == pytest.approx({"tokens_per_second": 32.0, "eta_seconds": 26.0, "mfu": 0.25})
    now[0] += 1.0
    assert clock.rates(8, 20)["tokens_per_second"] == pytest.approx(64.0)
    now[0] += 100.0  # steps that a rollback undoes
    clock.rewind(4)
    now[0] += 3.0
    assert clock.rates(7, 20)["tokens_per_second"] == pytest.approx(64.0)


def test_without_a_known_peak_there_is_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(tokens_per_step=64, peak_seconds_per_step=None)
    clock.rates(1, 2)
    now[0] += 1.0
    assert clock.rates(2, 2) == {"tokens_per_second": 64.0, "eta_seconds": 0.0}
