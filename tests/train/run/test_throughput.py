"""Rates of a run: they cover the steps between two calls, without pauses and compilation."""

import time

import jax
import pytest

from autoshard.models import GPTConfig, flops_per_token
from autoshard.sharding.machines.chips import CHIPS
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import make_program_of, train_step_of
from autoshard.train.program.planned_step import place_step
from autoshard.train.run import throughput
from autoshard.train.run.throughput import Clock, peak_seconds_per_step


def test_rates_cover_the_steps_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(tokens_per_step=64, peak_seconds_per_step=lambda: 0.5)
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
    clock = Clock(tokens_per_step=64, peak_seconds_per_step=lambda: None)
    clock.rates(1, 2)
    now[0] += 1.0
    assert clock.rates(2, 2) == {"tokens_per_second": 64.0, "eta_seconds": 0.0}


CONFIG = GPTConfig(vocab=256, context=64, width=64, heads=4, layers=3)


def gpt_of_ours() -> GPTConfig:
    """A factory, as users write them for `--model`."""
    return CONFIG


def test_the_mfu_of_a_users_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FLOPs of a model that is not built in are counted in its program."""
    config = TrainConfig(model=f"{__name__}:gpt_of_ours", gpt=CONFIG, batch_size=8, data=None)
    program = make_program_of(config)
    placed = place_step(train_step_of(config, program), program, config)
    assert peak_seconds_per_step(config, program, placed) is None  # a CPU has no known peak
    monkeypatch.setattr(throughput, "chip_name", lambda kind: "v5e")
    seconds = peak_seconds_per_step(config, program, placed)
    usual = flops_per_token(CONFIG) * 8 * CONFIG.context / (CHIPS["v5e"].flops * jax.device_count())
    assert seconds == pytest.approx(usual, rel=1e-3)
