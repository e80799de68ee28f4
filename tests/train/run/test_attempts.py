"""Attempts to train a run are recorded, and fruitless ones come to an end."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard._processes import RESTARTS
from autoshard.errors import AutoshardError, ConfigError
from autoshard.train.config.command_line import parse_config
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.run.attempts import Attempt, check_first_start, fruitless, read_attempts
from autoshard.train.run.loop import Trainer, train
from autoshard.train.step.train_state import TrainState


def attempt(folder: Path, step: int, limit: int = 3, error: BaseException | None = None, reason: str = "") -> None:
    this = Attempt(limit)
    this.check(folder, step)
    this.begin(folder, step)
    if error is None and not reason:
        return  # as if the process had been killed
    try:
        with this.recorded():
            this.reason = reason
            if error is not None:
                raise error
    except type(error or ValueError):
        pass


def before_each_step(trainer: Trainer, call: Callable[[TrainState], None]) -> None:
    """Let a trainer call a function with the state before each of its steps."""
    step = trainer.placed.step

    class Step:
        init = step.init

        def __call__(self, state: TrainState, batch: Any) -> Any:
            call(state)
            return step(state, batch)

    stand_in: Any = Step()
    trainer.placed = replace(trainer.placed, step=stand_in)


def test_attempts_that_save_nothing_come_to_an_end(tmp_path):
    attempt(tmp_path, 0, error=RuntimeError("no memory"))
    attempt(tmp_path, 10, error=RuntimeError("a cable"))
    attempt(tmp_path, 10)
    attempt(tmp_path, 10, error=RuntimeError("a fan"))
    before = read_attempts(tmp_path / "attempts.jsonl")
    with pytest.raises(AutoshardError, match=r"3 attempts in a row began at step 10 .*last one: RuntimeError: a fan"):
        attempt(tmp_path, 10)
    assert read_attempts(tmp_path / "attempts.jsonl") == before
    attempt(tmp_path, 10, limit=0)  # a user who continues the run by hand
    attempt(tmp_path, 20, reason="finished")
    assert [event["attempt"] for event in read_attempts(tmp_path / "attempts.jsonl")] == [1, 1, 2, 2, 3, 4, 4, 5, 6, 6]


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGTERM in another process", "finished", "notice of a preemption"])
def test_a_run_that_was_asked_to_stop_has_not_failed(tmp_path, reason):
    for _ in range(4):
        attempt(tmp_path, 10, reason=reason)
    assert fruitless(read_attempts(tmp_path / "attempts.jsonl"), 10, None) == []


def test_a_launch_by_hand_starts_the_count_anew(tmp_path, monkeypatch):
    for _ in range(2):
        for restarts in range(3):
            monkeypatch.setenv(RESTARTS, str(restarts))
            attempt(tmp_path, 10, error=RuntimeError("no memory"))
        monkeypatch.setenv(RESTARTS, "3")
        with pytest.raises(AutoshardError, match="3 attempts in a row began at step 10"):
            attempt(tmp_path, 10)


def test_attempts_that_end_before_they_begin_to_train_count(tmp_path, monkeypatch):
    monkeypatch.setenv(RESTARTS, "7")
    attempt(tmp_path, 10, reason="SIGTERM")
    monkeypatch.setenv(RESTARTS, "9")  # one that planned, and was killed
    attempt(tmp_path, 10, error=RuntimeError("a fan"))
    monkeypatch.setenv(RESTARTS, "11")  # another one
    with pytest.raises(AutoshardError, match="3 attempts in a row .*last one: it ended before it began to train"):
        attempt(tmp_path, 10)
    monkeypatch.setenv(RESTARTS, "2")  # two of another launch
    attempt(tmp_path, 10)
    events = read_attempts(tmp_path / "attempts.jsonl")
    assert len(fruitless(events, 10, 3)) == 3 and len(fruitless(events, 10, 2)) == 2


def test_a_line_that_a_crash_left_incomplete_is_skipped(tmp_path):
    attempt(tmp_path, 0)
    path = tmp_path / "attempts.jsonl"
    path.write_text(path.read_text() + '{"attempt": 2, "eve')
    attempt(tmp_path, 0)
    assert len(fruitless(read_attempts(path), 0, None)) == 2


def test_a_full_disk_does_not_hide_why_an_attempt_ended(tmp_path):
    this = Attempt(3)
    this.begin(tmp_path, 0)
    (tmp_path / "attempts.jsonl").unlink()
    (tmp_path / "attempts.jsonl").symlink_to("/dev/full")
    with pytest.raises(ValueError, match="the reason"), this.recorded():
        raise ValueError("the reason")


def test_a_run_that_never_begins_comes_to_an_end(monkeypatch):
    monkeypatch.setenv(RESTARTS, "2")
    check_first_start(3)
    monkeypatch.setenv(RESTARTS, "3")
    check_first_start(0)
    with pytest.raises(AutoshardError, match="3 times before and never began"):
        check_first_start(3)
    monkeypatch.setenv(RESTARTS, "often")
    with pytest.raises(ConfigError, match=f"{RESTARTS}=often must be a number"):
        check_first_start(3)


def test_one_command_line_starts_a_run_and_continues_it(tmp_path):
    arguments = ["--run-dir", str(tmp_path / "run"), "--resume-if-started", "--steps", "400", "--seed", "3"]

    def parse() -> TrainConfig:
        return parse_config(arguments, TrainConfig, "autoshard train", "")

    assert not parse().resume
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"seed": 3, "batch_size": 48}))
    assert parse().resume and parse().batch_size == 48
    with pytest.raises(ConfigError, match="needs the folder of the run"):
        parse_config(["--resume-if-started"], TrainConfig, "autoshard train", "")


@pytest.mark.slow
def test_a_run_records_its_attempts(make_config: Callable[..., TrainConfig], tmp_path, monkeypatch):
    config = make_config(run_dir=tmp_path / "run", steps=4, resume_if_started=True, checkpoint_every=2)
    trainer = Trainer(config)

    def fail(state: TrainState) -> None:
        if int(state.step) == 3:
            raise OSError("the network is gone")

    before_each_step(trainer, fail)
    with pytest.raises(OSError, match="network"):
        trainer.run()
    train(replace(config, resume=True))
    events = read_attempts(tmp_path / "run" / "attempts.jsonl")
    kept = [{key: event[key] for key in event if key in ("event", "step", "reason")} for event in events]
    kept = [event for event in kept if event["event"] != "save"]
    assert kept == [
        {"event": "begin", "step": 0},
        {"event": "end", "step": 3, "reason": "OSError: the network is gone"},
        {"event": "begin", "step": 2},
        {"event": "end", "step": 4, "reason": "finished"},
    ]
    assert not json.loads((tmp_path / "run" / "config.json").read_text())["resume_if_started"]


@pytest.mark.slow
def test_a_signal_before_the_first_step_does_not_wait_for_it(make_config: Callable[..., TrainConfig], tmp_path):
    trainer = Trainer(make_config(run_dir=tmp_path / "run", steps=50))
    first_state = trainer._first_state

    def interrupted(checkpoints):
        os.kill(os.getpid(), signal.SIGTERM)
        return first_state(checkpoints)

    trainer._first_state = interrupted
    result = trainer.run()
    assert (result.step, result.interrupted_by) == (0, "SIGTERM")
    assert read_attempts(tmp_path / "run" / "attempts.jsonl")[-1]["reason"] == "SIGTERM"
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").glob("*0")]


@pytest.mark.slow
def test_a_signal_is_the_reason(make_config: Callable[..., TrainConfig], tmp_path):
    trainer = Trainer(make_config(run_dir=tmp_path / "run", steps=50))
    before_each_step(trainer, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    trainer.run()
    assert read_attempts(tmp_path / "run" / "attempts.jsonl")[-1]["reason"] == "SIGTERM"
