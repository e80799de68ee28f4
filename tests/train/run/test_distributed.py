"""Starting from the environment, and agreeing on values, without other processes."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from autoshard.errors import ConfigError
from autoshard.train.run import distributed

LAUNCHERS = ("SLURM_NTASKS", "SKYPILOT_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")
GLOO = ("jax_cpu_collectives_implementation", "gloo")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The settings and the arguments that `jax.distributed` starts with; the environment describes one process."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: calls.append(setting))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, heartbeat_timeout_seconds: calls.append(args))
    for name in (*LAUNCHERS, "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    out = os.dup(1)
    yield calls
    sys.stdout.flush()
    os.dup2(out, 1)
    os.close(out)


def set_processes(monkeypatch: pytest.MonkeyPatch, count: str, process: str) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:4242")
    monkeypatch.setenv("JAX_NUM_PROCESSES", count)
    monkeypatch.setenv("JAX_PROCESS_ID", process)


@pytest.mark.parametrize(("process", "printed"), [(0, "a line"), (1, "")])
def test_the_variables_start_the_run_and_only_the_main_process_prints(
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    process: int,
    printed: str,
) -> None:
    set_processes(monkeypatch, "2", str(process))
    distributed.initialize()
    os.write(1, b"a line")
    assert started == [GLOO, ("10.0.0.1:4242", 2, process)]
    assert capfd.readouterr().out == printed


def test_variables_that_are_not_numbers_are_an_error(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_processes(monkeypatch, "two", "1")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES=two and JAX_PROCESS_ID=1 must be numbers"):
        distributed.initialize()
    assert started == []


@pytest.mark.parametrize(
    ("name", "value", "starts"),
    [
        ("SLURM_NTASKS", "4", True),
        ("SLURM_NTASKS", "1", False),
        ("OMPI_COMM_WORLD_SIZE", "2", True),
        ("OMPI_COMM_WORLD_SIZE", "many", False),
        ("TPU_WORKER_HOSTNAMES", "one,two", True),
        ("TPU_WORKER_HOSTNAMES", "localhost", False),
    ],
)
@pytest.mark.parametrize("process", [0, 3])
def test_a_launcher_of_several_processes_is_left_to_jax(
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    name: str,
    value: str,
    starts: bool,
    process: int,
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", str(process))
    monkeypatch.setattr(jax, "process_index", lambda: process)
    distributed.initialize()
    os.write(1, b"a line")
    assert started == ([GLOO, ()] if starts else [])
    assert capfd.readouterr().out == ("" if starts and process else "a line")


def test_a_run_that_has_started_is_not_started_again(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_processes(monkeypatch, "2", "1")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    distributed.initialize()
    assert started == []


def test_values_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "exchange", lambda what, text: ["11", text])
    assert distributed.value_of_main_process(7) == 11
    monkeypatch.setattr(distributed, "exchange", lambda what, text: [text, json.dumps([5.0, 0.5])])
    assert distributed.maximum_over_processes("step 3", [2.0, 4.0]) == [5.0, 4.0]
