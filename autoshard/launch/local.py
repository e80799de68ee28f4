"""Launches the processes of a run on this machine."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from autoshard.launch.job import Job
from autoshard.launch.processes import LocalProcess, Process, Supervisor
from autoshard.launch.settings import process_settings


def show(job: Job) -> str:
    """Return the command lines of the processes. A free port is chosen when they start."""
    lines = []
    for process in range(job.hosts):
        settings = dict(job.env) | process_settings("127.0.0.1:PORT", job.hosts, process, 0)
        lines.append(shlex.join(["env", *(f"{name}={value}" for name, value in settings.items()), *job.local_command]))
    return "\n".join(lines) + "\n"


def submit(job: Job) -> int:
    """Run the processes to the end of the job; return its exit code."""

    def start(count: int, restarts: int) -> Sequence[Process]:
        address = f"127.0.0.1:{_free_port()}"
        return [
            LocalProcess.start(
                f"process {process}",
                job.local_command,
                os.environ | job.env | process_settings(address, count, process, restarts),
                str(job.folder),
            )
            for process in range(count)
        ]

    return Supervisor(job, start, lambda: saved_steps(job.checkpoints)).run()


def saved_steps(checkpoints: Path) -> list[str]:
    """Return the names in a run's folder of checkpoints; empty if there is none."""
    return sorted(entry.name for entry in checkpoints.iterdir()) if checkpoints.is_dir() else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
