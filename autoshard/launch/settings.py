"""The environment variables in which a launcher passes a process its place in the run."""

from __future__ import annotations

from autoshard._processes import COORDINATOR_PORT, RESTARTS


def process_settings(address: str, count: int, process: int, restarts: int) -> dict[str, str]:
    """Return the variables of one process.

    Args:
        address: Address of process 0, as HOST:PORT.
        count: Number of processes.
        process: Number of the process.
        restarts: Number of restarts of the run so far.
    """
    return {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(process),
        RESTARTS: str(restarts),
    }


def with_port(address: str) -> str:
    """Return an address with the default port if it has none.

    Example:
        >>> with_port("10.0.0.1")
        '10.0.0.1:8476'
    """
    return address if ":" in address.rpartition("]")[2] else f"{address}:{COORDINATOR_PORT}"
