"""Local processes: a killed process, a signal to the launcher, and an error."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from autoshard.train.run.attempts import read_attempts
from autoshard.train.run.metrics import read_metrics
from tests.compiler_flags import xla_flags

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "--preset quick --gpt.layers 1 --gpt.width 32 --gpt.heads 2 --gpt.context 16 --gpt.dropout 0 --batch-size 8 "
    "--log-every 1 --sample-tokens 0 --virtual-devices 2 --deadline-seconds 60 --data text.txt --run-dir run"
).split()
# A network of their own for the processes below, whose loopback interface is slow.
SLOW_NETWORK = (
    "unshare", "-n", "sh", "-c",
    'ip link set lo up && tc qdisc add dev lo root tbf rate 8mbit burst 64kb latency 400ms && exec "$@"', "sh",
)  # fmt: skip
# Only Linux lists the children of a process, here those of the launcher, in /proc.
reads_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc of Linux")


def launch(folder: Path, launching: str, training: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    command = [
        *before,
        sys.executable,
        "-m",
        "autoshard",
        "launch",
        *launching.split(),
        "--",
        "train",
        *SIZES,
        *training.split(),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def children(launcher: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


def wait_for_step(folder: Path, step: int, launcher: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if launcher.poll() is not None or any(
            line["step"] >= step for line in read_metrics(folder / "run/metrics.jsonl")
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in 120 s")


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(folder / "run/metrics.jsonl") if "loss" in line}


def test_an_error_of_a_process_ends_the_launch(tmp_path):
    launcher = launch(tmp_path, "--processes 2", "--plan dp:3 --steps 2")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert errors.count("\n") == 1 and "'dp:3' is for 3 devices, but the launch has 4" in errors


@pytest.mark.slow
@pytest.mark.multiprocess
@reads_proc
def test_an_elastic_run_loses_no_saved_step_and_keeps_its_losses(tmp_path):
    """The second of two processes is killed; the rest of the run is done by one, with the same losses."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    steps = "--steps 60 --checkpoint-every 5 --gpt.dtype float32"
    unbroken = launch(whole, "--processes 2", steps)
    assert unbroken.wait(300) == 0
    launcher = launch(parts, "--processes 2 --elastic", steps)
    wait_for_step(parts, 20, launcher)
    os.kill(children(launcher)[1], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors
    assert "lost process 1; restart 1, with 1 of 2" in errors
    begun = [event for event in read_attempts(parts / "run/attempts.jsonl") if event["event"] == "begin"]
    assert [event["devices"] for event in begun] == [4, 2] and begun[1]["step"] >= 15
    expected, found = losses(whole), losses(parts)
    assert list(found) == list(range(1, 61))
    np.testing.assert_allclose([found[n] for n in expected], [*expected.values()], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
@reads_proc
def test_a_signal_to_the_launcher_saves_the_run(tmp_path):
    launcher = launch(tmp_path, "--processes 2", "--steps 5000")
    wait_for_step(tmp_path, 3, launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(120) == 75
    [begin, end] = read_attempts(tmp_path / "run/attempts.jsonl")
    assert end["reason"].startswith("SIGTERM") and end["step"] >= 3
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["steps"] == 5000 and list((tmp_path / "run/checkpoints").glob(f"step_*{end['step']}"))


def slows_networks() -> bool:
    try:
        return subprocess.run([*SLOW_NETWORK, "true"], capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_slow_network_changes_no_loss(tmp_path):
    """The gradients of a step take longer than the step; nothing is taken for a hang or a loss."""
    if not slows_networks():
        pytest.skip("this user may not slow a network: needs unshare and tc")
    found = {}
    for name, before in (("fast", ()), ("slow", SLOW_NETWORK)):
        (tmp_path / name).mkdir()
        launcher = launch(tmp_path / name, "--processes 2", "--steps 20 --gpt.dtype float32 --plan dp:4", before)
        _, errors = launcher.communicate(timeout=300)
        assert launcher.returncode == 0 and "restart" not in errors, errors
        found[name] = losses(tmp_path / name)
    assert found["slow"] == pytest.approx(found["fast"], rel=1e-6) and len(found["fast"]) == 20
