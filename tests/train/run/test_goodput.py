"""The time of a run by cause."""

import time

import pytest

from autoshard.train.run.attempts import Attempt
from autoshard.train.run.goodput import Goodput, account, goodput_of, goodput_text


def test_time_is_counted_by_cause_and_the_rest_is_steps():
    goodput = Goodput()
    time.sleep(0.02)
    assert list(goodput.seconds()) == ["start"]
    goodput.begin_steps()
    with goodput.spent_on("save"):
        time.sleep(0.05)
        with goodput.spent_on("data"):  # counts for the outer cause
            time.sleep(0.05)
    for item in goodput.waiting(iter([1, 2]), "data"):
        assert item in (1, 2)
        time.sleep(0.03)
    found = goodput.seconds()
    assert 0.1 <= found["save"] < 0.5 and found["data"] < 0.05 and found["steps"] >= 0.06
    assert list(found) == ["steps", "start", "save", "data"] and 0.02 <= found["start"] < 0.5


def test_steps_that_a_rollback_undoes_are_lost(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    attempt = Attempt(limit=0)
    now[0] += 1.0
    attempt.goodput.begin_steps()
    now[0] += 4.0
    attempt.saved(2)
    now[0] += 3.0
    attempt.rolled_back(2)
    assert attempt.goodput.seconds() == {"start": 1.0, "steps": 4.0, "lost": 3.0} and attempt.step == 2
    now[0] += 5.0
    attempt.rolled_back(0)  # the attempt began with it
    assert attempt.goodput.seconds() == {"start": 1.0, "steps": 0.0, "lost": 12.0}


def at(second: int) -> str:
    return f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.000+00:00"


def event(attempt: int, kind: str, second: int, step: int, **values: object) -> dict[str, object]:
    return {"attempt": attempt, "event": kind, "time": at(second), "step": step, **values}


def test_work_after_the_last_save_is_lost():
    events = [
        event(1, "begin", 5, 0, seconds={"plan": 5.0}),
        event(1, "save", 50, 10, seconds={"plan": 5.0, "steps": 35.0, "compile": 9.0, "save": 1.0}),
        # Attempt 1 wrote its last metrics at 70 s and was killed. Attempt 2 began at 100 s, from step 10.
        event(2, "begin", 100, 10, alive=at(70), seconds={"plan": 4.0}),
        event(2, "save", 150, 20, seconds={"plan": 4.0, "steps": 45.0, "restore": 5.0}),
        event(2, "end", 160, 24, reason="ValueError", seconds={"plan": 4.0, "steps": 55.0, "restore": 5.0}),
        event(3, "begin", 165, 20, alive=at(158)),
        event(3, "end", 200, 30, reason="finished", seconds={"steps": 30.0, "restore": 5.0}),
    ]
    spent = account(events)
    assert spent == {
        "plan": 5.0 + 4.0, "steps": 110.0, "compile": 9.0, "save": 1.0, "restore": 10.0, "lost": 20.0 + 10.0,
        "between": 26.0 + 5.0,
    }  # fmt: skip
    assert sum(spent.values()) == 200.0
    assert goodput_of(spent) == pytest.approx(110 / 200)
    assert goodput_text(spent, 3) == (
        "goodput 55 % of 3.33 min in 3 attempts: steps 110 s, between attempts 31.0 s, lost work 30.0 s, "
        "restore 10.0 s, plan 9.00 s, compile 9.00 s, save 1.00 s"
    )


def test_an_attempt_that_saved_nothing_is_lost_whole():
    events = [
        event(1, "begin", 0, 0, seconds={}),
        event(2, "begin", 60, 0, alive=at(40)),
        event(2, "end", 90, 5, seconds={"steps": 30.0}),
    ]
    assert account(events) == {"lost": 40.0, "between": 20.0, "steps": 30.0}
    assert goodput_of({}) == 0.0


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_clock_that_jumps_within_an_attempt_changes_nothing(jump: int) -> None:
    events = [
        event(1, "begin", 3605, 0, seconds={"plan": 5.0}),
        event(1, "save", 3650, 10, seconds={"plan": 5.0, "steps": 45.0}),
        event(1, "save", 3660 + jump, 20, seconds={"plan": 5.0, "steps": 55.0}),
        event(2, "begin", 3700 + jump, 10, alive=at(3670 + jump), seconds={"plan": 4.0}),
        event(2, "end", 3710 + jump, 30, reason="finished", seconds={"plan": 4.0, "steps": 10.0}),
    ]
    assert account(events) == {"plan": 9.0, "steps": 55.0, "lost": 20.0, "between": 26.0}
