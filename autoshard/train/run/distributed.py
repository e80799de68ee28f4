"""Several processes as one run: started from the environment, where there is one."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence

import jax

from autoshard._processes import DEADLINE_S, exchange, named
from autoshard.errors import ConfigError

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# JAX ends processes itself where one is silent for so long; ours end them first, and say which one it was.
_HEARTBEAT_S = int(2 * DEADLINE_S)
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


def set_virtual_devices(count: int | None, explicit: bool) -> None:
    """Split the CPU into devices; takes effect only before JAX first looks at its devices.

    Args:
        count: Number of devices; None leaves the environment as it is.
        explicit: Whether the user asked for the number, which then replaces one in the environment.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if count is None or (_DEVICE_FLAG in flags and not explicit):
        return
    others = re.sub(rf"{_DEVICE_FLAG}=\d+", "", flags)
    os.environ["XLA_FLAGS"] = f"{others} {_DEVICE_FLAG}={count}".strip()


def initialize() -> None:
    """Start `jax.distributed` where the environment describes more than one process.

    That is `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, or a cluster that JAX knows
    by itself (Slurm, Open MPI, a TPU pod).

    Raises:
        ConfigError: Some of the three variables are set, but not all, or they are not numbers.
    """
    if jax.distributed.is_initialized():
        return
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if given:
        missing = [name for name in _VARIABLES if name not in given]
        if missing:
            raise ConfigError(f"{', '.join(given)} is set, but {', '.join(missing)} is not: set all three or none")
        address, processes, process = given.values()
        if not (processes.isdigit() and process.isdigit()):
            raise ConfigError(f"JAX_NUM_PROCESSES={processes} and JAX_PROCESS_ID={process} must be numbers")
        _use_cpu_collectives()
        jax.distributed.initialize(address, int(processes), int(process), heartbeat_timeout_seconds=_HEARTBEAT_S)
        if int(process):
            _silence()
    elif _in_cluster():
        _use_cpu_collectives()
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_S)
        if not is_main():
            _silence()


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The main process's value, in every process."""
    return int(exchange("agree on a value", str(int(value)))[0])


def check_same(what: str, value: str) -> None:
    """Wait until every process has come here, with the same value.

    Raises:
        ConfigError: In every process, where one has another.
    """
    found = exchange(what, value)
    others = [process for process, one in enumerate(found) if one != found[0]]
    if others:
        raise ConfigError(f"{what}: not the same in {named(others)} as in process 0")


def largest(what: str, values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes; every process must ask at the same step."""
    found = exchange(what, json.dumps(list(values)))
    return [max(each) for each in zip(*map(json.loads, found), strict=True)]


def _silence() -> None:
    """Nothing more on this process's standard output, not even from the libraries that write there by themselves."""
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _in_cluster() -> bool:
    """Whether the environment of a launcher says that there are more processes than this one."""
    sizes = (os.environ.get(name, "") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return any(size.isdigit() and int(size) > 1 for size in sizes) or len(hosts) > 1


def _use_cpu_collectives() -> None:
    # Only says what CPU devices of several processes would talk over; other platforms do not read it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
