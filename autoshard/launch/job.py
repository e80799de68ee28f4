"""The job of a launcher: a training run, its hosts, and how it is restarted."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.launch.machine import Machine
from autoshard.launch.volume import Volume
from autoshard.train.config import run_directory

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # what Kubernetes accepts, with room for its suffixes


@shown
@dataclass(frozen=True)
class Job:
    """A training run to launch.

    Attributes:
        name: Name of the job for its scheduler.
        train: Arguments of `autoshard train`.
        run_dir: Folder of the run, as those arguments give it.
        hosts: Number of hosts, or of local processes.
        fewest_hosts: Smallest number of hosts for a restart; equal to `hosts` if the run is not elastic.
        max_failures: Attempts in a row without a new checkpoint, after which the run gives up.
        folder: Folder in which the command runs; `.` leaves it to the container image.
        machine: The machine to request; None leaves it to the scheduler's own options.
        coordinator: Address of the first process on the interface that the processes use, as HOST or HOST:PORT; None
            leaves it to the environment.
        env: Environment variables of every process.
        volume: Storage that every host mounts; None if they share the run's folder already.
    """

    name: str
    train: Sequence[str]
    run_dir: Path
    hosts: int
    fewest_hosts: int
    max_failures: int
    folder: Path
    machine: Machine | None = None
    coordinator: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    volume: Volume | None = None

    def __post_init__(self) -> None:
        """Check the name.

        Raises:
            ConfigError: A scheduler would refuse the name.
        """
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r}: give at most 40 lower-case letters, digits and dashes, the first one a letter"
            )

    @property
    def checkpoints(self) -> Path:
        """The run's folder of checkpoints."""
        return self.folder / self.run_dir / run_directory.CHECKPOINTS

    @property
    def arguments(self) -> list[str]:
        """The arguments of `autoshard`, with those that let one command line start a run and restart it."""
        return ["train", *self.train, "--resume-if-started", "--max-failures", str(self.max_failures)]

    @property
    def command(self) -> list[str]:
        """The command line of a process, where `autoshard` is on the path."""
        return ["autoshard", *self.arguments]

    @property
    def local_command(self) -> list[str]:
        """The command line of a process on this machine, with this interpreter."""
        return [sys.executable, "-m", "autoshard", *self.arguments]

    @property
    def shell_command(self) -> str:
        """The command line as text for a shell."""
        return shlex.join(self.command)
