"""One of two processes is stopped, hangs or dies: the other reports it, and both exit for a restart."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from autoshard import _compat
from autoshard._processes import EXIT_RESTART
from autoshard.ckpt import Checkpointer
from autoshard.train.run import watchdog
from autoshard.train.run.metrics import read_metrics
from autoshard.train.run.watchdog import Watchdog, is_lost_peer
from tests.compiler_flags import xla_flags

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 12.0  # chosen

pytestmark = pytest.mark.multiprocess

Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a long run in two processes with two devices each, and kill those that are left after the test."""
    started: list[subprocess.Popen[str]] = []
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 100)

    def run(*options: str, count: int = 2) -> list[subprocess.Popen[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        small = "--gpt.layers 1 --gpt.width 16 --gpt.heads 2 --gpt.context 16 --batch-size 8 --sample-tokens 0".split()
        command = ["train", "--run-dir", str(tmp_path / "run"), "--data", str(text), *small, *options]
        for process in range(count):
            env = os.environ | {
                "PYTHONPATH": str(ROOT),
                "XLA_FLAGS": xla_flags(devices=2),
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(process),
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "autoshard", *command],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )  # fmt: skip
            )
        return started[-count:]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def until_steps(run_dir: Path, processes: list[subprocess.Popen[str]], lines: int = 3) -> None:
    end = time.monotonic() + 120
    while len(read_metrics(run_dir / "metrics.jsonl")) < lines:
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.05)


LONG = ["--steps", "1000000", "--log-every", "5", "--deadline-seconds", str(DEADLINE_S)]


@pytest.mark.slow
def test_sigterm_in_one_process_saves_the_same_step_in_all(start: Start, tmp_path: Path) -> None:
    one, other = started = start(*LONG)
    until_steps(tmp_path / "run", started)
    other.send_signal(signal.SIGTERM)
    out, errors = one.communicate(timeout=60)
    other.communicate(timeout=60)
    assert (one.returncode, other.returncode) == (EXIT_RESTART, EXIT_RESTART), errors
    assert "SIGTERM in another process: saved and stopped at step" in out
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        [step] = checkpoints.steps()
        state = checkpoints.restore()
    assert int(state["step"]) == step and json.dumps(step) in out


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_hangs_is_named(start: Start, tmp_path: Path, stopped: int) -> None:
    started = start(*LONG)
    until_steps(tmp_path / "run", started)
    started[stopped].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    _, errors = started[1 - stopped].communicate(timeout=10 * DEADLINE_S)
    assert started[1 - stopped].returncode == EXIT_RESTART, errors
    assert time.monotonic() - begun < 4 * DEADLINE_S
    message = next(line for line in errors.splitlines() if "gives up" in line)
    assert f"process {1 - stopped} gives up: step " in message and f"process {stopped}" in message, message
    assert "Thread 0x" in errors  # the stacks of the threads


@pytest.mark.slow
def test_the_other_process_exits_when_one_dies(start: Start, tmp_path: Path) -> None:
    one, other = started = start(*LONG)
    until_steps(tmp_path / "run", started)
    other.kill()
    _, errors = one.communicate(timeout=10 * DEADLINE_S)
    assert one.returncode == EXIT_RESTART, errors[-3000:]
    assert "gives up" in errors


def test_a_single_process_is_not_watched() -> None:
    """Without other processes there is nothing to wait for, and the deadline is ignored."""
    exits: list[int] = []
    with Watchdog(0.01, leave=exits.append) as watchdog:
        time.sleep(0.1)
        watchdog.beat(3)
    assert exits == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # SystemExit in the thread
def test_a_pause_waits_for_a_slow_disk_but_not_for_a_lost_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The watchdog is paused while a checkpoint is written, for example."""
    exits: list[int] = []
    heartbeats, alive = itertools.count(), threading.Event()
    alive.set()

    def read(seconds: float) -> dict[int, tuple[int, int]]:
        return {0: (next(heartbeats) if alive.is_set() else -1, 3), 1: (0, 3)}

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(_compat, "publish_text", lambda *_, **__: None)
    monkeypatch.setattr(
        watchdog, "_heartbeats", lambda _: {0: (next(heartbeats) if alive.is_set() else -1, 3), 1: (0, 3)}
    )
    with Watchdog(0.2, leave=exits.append) as watching, watching.paused():
        time.sleep(1.5)
        assert exits == []
        alive.clear()
        end = time.monotonic() + 60
        while not exits and time.monotonic() < end:
            time.sleep(0.05)
    assert exits[0] == EXIT_RESTART
    assert "process 1 gives up: waiting after step 0: process 0 sends no heartbeat" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("INTERNAL: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4242", True),
        ("RESOURCE_EXHAUSTED: Out of memory", False),
    ],
)
def test_errors_that_mean_a_lost_process(text: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Any = RuntimeError(text)
    assert not is_lost_peer(error)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert is_lost_peer(error) == lost
