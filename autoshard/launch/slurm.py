"""Slurm: a batch script that starts one process on each node and queues itself again."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence

from autoshard._processes import EXIT_RESTART, RESTARTS
from autoshard.errors import ConfigError
from autoshard.launch.constants import SAVE_S, SLURM_ERROR
from autoshard.launch.job import Job
from autoshard.launch.rendering import render
from autoshard.launch.settings import with_port

_OPTION = re.compile(r"[a-z][a-z0-9-]+")


def show(job: Job, options: Sequence[str] = ()) -> str:
    """Return the batch script.

    Args:
        job: The job. Each host is a node with one task.
        options: More options of sbatch, such as `partition=a3`.
    """
    return render(
        "slurm.sh.j2",
        job=job,
        options=[_quoted(option) for option in options],
        restarts=RESTARTS,
        save_s=SAVE_S,
        exit_restart=EXIT_RESTART,
        error=SLURM_ERROR,
        coordinator=with_port(job.coordinator) if job.coordinator else None,
        gpus=job.machine.chips_per_host if job.machine is not None and job.machine.platform == "cuda" else None,
    )


def submit(job: Job, options: Sequence[str] = ()) -> int:
    """Submit the batch script; return the exit code of sbatch."""
    return subprocess.run(["sbatch"], input=show(job, options), text=True, check=False).returncode


def check_options(options: Sequence[str]) -> None:
    """Check that the options are long ones, and that the script does not set them itself.

    Raises:
        ConfigError: An option is short, or the script sets it.
    """
    own = "job-name nodes ntasks ntasks-per-node gpus-per-node requeue no-requeue open-mode signal chdir".split()
    for option in options:
        name = option.partition("=")[0].removeprefix("--")
        if name in own:
            raise ConfigError(f"--sbatch {option!r}: the launcher sets it itself; leave it out")
        if not _OPTION.fullmatch(name):
            raise ConfigError(f"--sbatch {option!r}: write the long option, NAME=VALUE, such as partition=a3")


def _quoted(option: str) -> str:
    """Return an option in the form that a line of a batch script needs."""
    name, equals, value = option.removeprefix("--").partition("=")
    return f"--{name}{equals}{shlex.quote(value) if value else ''}"
