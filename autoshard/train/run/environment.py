"""The place of this process in a run of several processes, as the environment describes it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from autoshard._processes import COORDINATOR_PORT
from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.train.run.cloud import metadata

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID")
_SKYPILOT = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
_ONE_TASK = "start the processes with srun, or unset SLURM_NTASKS to train in one process"


@shown
@dataclass(frozen=True)
class Place:
    """The place of a process among those of its run.

    Attributes:
        address: Address of process 0, as HOST:PORT.
        processes: Number of processes.
        process: Number of this process.
    """

    address: str
    processes: int
    process: int


def find_place() -> Place | None:
    """Read this process's place from JAX's own variables, from Slurm's with an address, or from SkyPilot's.

    Returns:
        The place; None if none of them describes several processes, or if JAX detects the cluster by itself.

    Raises:
        ConfigError: Variables are missing or invalid; the message names them.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if set(given) == {_VARIABLES[0]} and os.environ.get(_SLURM[0]):
        count, process = _numbers(_SLURM, _ONE_TASK)
        return _place(given[_VARIABLES[0]], count, process, _SLURM)
    if given:
        missing = [name for name in _VARIABLES if name not in given]
        if missing:
            raise ConfigError(f"{', '.join(given)} is set, but {', '.join(missing)} is not: set all three or none")
        count, process = _numbers(_VARIABLES[1:], "set all three or none")
        return _place(given[_VARIABLES[0]], count, process, _VARIABLES)
    if os.environ.get(_SKYPILOT[0], "1") != "1":
        count, process = _numbers(_SKYPILOT[:2], "SkyPilot sets both")
        addresses = os.environ.get(_SKYPILOT[2], "").split()
        if len(addresses) != count:
            raise ConfigError(f"{_SKYPILOT[0]} is {count}, but {_SKYPILOT[2]} has {len(addresses)} addresses")
        return _place(f"{addresses[0]}:{COORDINATOR_PORT}", count, process, _SKYPILOT)
    return None


def is_in_cluster() -> bool:
    """Return whether a launcher or a TPU pod that JAX detects by itself has more than one process.

    Launchers are known by their variables. TPU VMs that were made without one have none, so that the cloud's metadata
    server is asked.

    Raises:
        ConfigError: Slurm has several tasks, but this process is none of them.
    """
    sizes = {name: os.environ.get(name, "") for name in (_SLURM[0], "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")}
    several = {name for name, size in sizes.items() if size.isdigit() and int(size) > 1}
    if _SLURM[0] in several:
        _numbers(_SLURM, _ONE_TASK)
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return bool(several) or len(hosts) > 1 or _is_in_tpu_slice()


def _is_in_tpu_slice() -> bool:
    """Return whether this machine is a TPU VM of Google's with other hosts, and JAX may use its TPUs."""
    platforms = os.environ.get("JAX_PLATFORMS", "tpu").split(",")
    if "tpu" not in platforms or "TPU_SKIP_MDS_QUERY" in os.environ or metadata.find_cloud() != "google":
        return False
    hosts = (metadata.google("attributes/worker-network-endpoints") or "").split(",")
    slices = re.search(r"^MEGASCALE_NUM_SLICES: *'?(\d+)", metadata.google("attributes/tpu-env") or "", re.MULTILINE)
    return len(hosts) > 1 or (slices is not None and int(slices[1]) > 1)


def _place(address: str, count: int, process: int, names: tuple[str, ...]) -> Place:
    if not 0 <= process < count:
        raise ConfigError(f"process {process} of {count} does not exist: {', '.join(names)} contradict each other")
    return Place(address, count, process)


def _numbers(names: tuple[str, ...], remedy: str) -> list[int]:
    values = {name: os.environ.get(name, "") for name in names}
    if missing := [name for name, value in values.items() if not value]:
        raise ConfigError(f"{', '.join(missing)} is not set: {remedy}")
    if not all(value.isdigit() for value in values.values()):
        raise ConfigError(f"{' and '.join(f'{name}={value}' for name, value in values.items())} must be numbers")
    return [int(value) for value in values.values()]
