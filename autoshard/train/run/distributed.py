"""Run several processes as one training run: start them from the environment, and let them agree on values."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

import jax

from autoshard._processes import DEADLINE_S, exchange, processes_text
from autoshard.errors import ConfigError
from autoshard.train.run.environment import find_place, is_in_cluster

# JAX ends all processes if one is silent for this time, in seconds. Our own deadline is half of it, so that ours comes
# first and reports which process is silent.
_HEARTBEAT_S = int(2 * DEADLINE_S)
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


def set_virtual_devices(count: int | None, explicit: bool) -> None:
    """Split the CPU into virtual devices. This has an effect only before JAX initializes its devices.

    Args:
        count: Number of devices; None leaves the environment as it is.
        explicit: Whether the user gave the number. It then overrides one in the environment.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if count is None or (_DEVICE_FLAG in flags and not explicit):
        return
    others = re.sub(rf"{_DEVICE_FLAG}=\d+", "", flags)
    os.environ["XLA_FLAGS"] = f"{others} {_DEVICE_FLAG}={count}".strip()


def initialize() -> None:
    """Start `jax.distributed` if the environment describes several processes.

    The environment does so by `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, by SkyPilot's
    variables, or by a launcher that JAX detects itself (Slurm, Open MPI, a TPU pod).

    Raises:
        ConfigError: Variables are missing, invalid, or contradict each other; the message names them.
    """
    if jax.distributed.is_initialized():
        return
    if (place := find_place()) is not None:
        _use_cpu_collectives()
        jax.distributed.initialize(
            place.address, place.processes, place.process, heartbeat_timeout_seconds=_HEARTBEAT_S
        )
        if place.process:
            _silence()
    elif is_in_cluster():
        _use_cpu_collectives()
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_S)
        if not is_main():
            _silence()


def is_main() -> bool:
    """Whether this is the main process, which prints and writes files."""
    return jax.process_index() == 0


def value_of_main_process(value: int) -> int:
    """Return the main process's value in every process."""
    return int(exchange("agree on a value", str(int(value)))[0])


def check_same(what: str, value: str) -> None:
    """Wait until every process gets here, and check that all have the same value.

    Args:
        what: Names the value, for messages.
        value: This process's value.

    Raises:
        ConfigError: The values differ; raised in every process.
    """
    values = exchange(what, value)
    others = [process for process, other in enumerate(values) if other != values[0]]
    if others:
        raise ConfigError(
            f"{what}: not the same in {processes_text(others)} as in process 0. Give every process the same"
        )


def maximum_over_processes(what: str, values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all processes. Every process must call this at the same step.

    Args:
        what: Names the exchange, for messages.
        values: This process's values.
    """
    gathered = exchange(what, json.dumps(list(values)))
    return [max(each) for each in zip(*map(json.loads, gathered), strict=True)]


def _silence() -> None:
    """Discard this process's standard output, including that of libraries written in other languages."""
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _use_cpu_collectives() -> None:
    # Selects the collectives between CPU devices of several processes. Other platforms ignore it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
