"""What the watchdog of one process reports about the others, without starting them."""

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest

from autoshard import _compat
from autoshard.train.run import watchdog
from autoshard.train.run.watchdog import EXIT_RESTART, Watchdog, exit_for_restart

SHORT_S = 0.04  # the deadline of these tests; chosen: heartbeats are read 12.5 ms apart


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """Let process 1 run beside process 0, which is at a step and sends heartbeats or does not: `other(3, True)`."""
    beats = itertools.count()

    def be_at(step: int, alive: bool) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(_compat, "texts_under", lambda _: {"0": f"{next(beats) if alive else 5} {step}"})

    return be_at


@pytest.mark.parametrize(
    ("step", "alive", "message"),
    [
        (4, False, "process 0 sends no heartbeat (last: 0 at step 4)"),
        (4, True, "process 0 is alive but behind, at step 4"),
        (7, True, "all processes are alive and at that step: the step is slow, or they wait for each other"),
    ],
)
def test_silent_processes_are_told_from_slow_ones(
    other: Callable[[int, bool], None], step: int, alive: bool, message: str
) -> None:
    other(step, alive)
    watching = Watchdog(SHORT_S)
    watching.beat(7)
    assert watching.suspects() == message


def test_a_process_that_never_sent_a_heartbeat_has_no_last_step(
    other: Callable[[int, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    other(0, False)
    monkeypatch.setattr(_compat, "texts_under", lambda _: {})
    assert Watchdog(SHORT_S).suspects() == "process 0 sends no heartbeat"


def test_a_coordinator_that_does_not_answer_is_named(
    other: Callable[[int, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> dict[str, str]:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    other(0, True)
    monkeypatch.setattr(_compat, "texts_under", fail)
    assert Watchdog(SHORT_S).suspects() == "process 0, which coordinates the others, does not answer"


def test_a_step_over_its_deadline_ends_the_process(
    other: Callable[[int, bool], None], capfd: pytest.CaptureFixture
) -> None:
    exits: list[int] = []
    other(2, True)
    watching = Watchdog(SHORT_S, leave=exits.append)
    watching.beat(7)
    begun = time.monotonic()
    with pytest.raises(SystemExit):
        watching._watch()
    assert exits == [EXIT_RESTART] and time.monotonic() - begun > SHORT_S
    errors = capfd.readouterr().err
    assert "process 1 gives up: step 8 did not end within 0.04 s: process 0 is alive but behind, at step 2" in errors
    assert "test_a_step_over_its_deadline_ends_the_process" in errors  # the stack of this thread


def test_heartbeats_have_a_number_and_the_step(
    other: Callable[[int, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that does not take one heartbeat gets the next one."""
    sent: list[tuple[str, str, bool]] = []
    three = threading.Event()

    def publish(key: str, text: str, *, again: bool = False) -> None:
        sent.append((key, text, again))
        if len(sent) == 1:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        if len(sent) == 3:
            three.set()

    other(7, True)
    monkeypatch.setattr(_compat, "publish_text", publish)
    watching = Watchdog(SHORT_S)
    watching.beat(7)
    sender = threading.Thread(target=watching._send_heartbeats)
    sender.start()
    assert three.wait(20)
    watching.__exit__()
    sender.join(20)
    assert not sender.is_alive()
    assert sent[:3] == [("autoshard/beat/1", f"{number} 7", True) for number in range(3)]


def test_the_coordinating_process_waits_before_it_exits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The others ask it which process is silent."""
    happened: list[object] = []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=happened.append))
    with pytest.raises(SystemExit):
        exit_for_restart("a disk is full", happened.append)
    assert happened == [5.0, EXIT_RESTART]
    assert "autoshard: process 0 gives up: a disk is full" in capfd.readouterr().err
