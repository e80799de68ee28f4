"""Launches the processes of a run on hosts that are reached over SSH, without a scheduler."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.launch.job import Job
from autoshard.launch.processes import Process, Supervisor
from autoshard.launch.settings import process_settings, with_port

_UNREACHABLE = 255  # ssh's own exit code when there is no connection
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")  # seconds; chosen
# A host counts as lost after a minute of silence. Chosen: shorter than the deadline of a step, so that the launcher
# knows which host is lost before the others stop.
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")

# The remote shell runs the command beside a reader of its standard input. When the connection ends, for whatever
# reason, the reader sends SIGTERM to the command, so that no process is left behind.
_REMOTE = (
    "cd {folder} || exit 2; {command} & child=$!; exec 3<&0; "
    "{{ cat <&3 >/dev/null 2>&1; kill -TERM $child 2>/dev/null; }} >/dev/null 2>&1 & reader=$!; "
    "wait $child; code=$?; kill $reader 2>/dev/null; exit $code"
)


@shown
@dataclass
class RemoteProcess:
    """A process on another host, at the end of an SSH connection.

    Attributes:
        name: Its host.
        connection: The local `ssh`.
    """

    name: str
    connection: subprocess.Popen[bytes] = field(repr=False)

    def poll(self) -> int | None:
        """Return its exit code; -9 if the connection was lost; None while it runs."""
        code = self.connection.poll()
        return -9 if code == _UNREACHABLE else code

    def stop(self) -> None:
        """End the standard input of the remote shell, which then sends SIGTERM."""
        if self.connection.stdin is not None:
            self.connection.stdin.close()

    def kill(self) -> None:
        """Close the connection."""
        self.stop()
        self.connection.kill()


def remote_command(job: Job, settings: Mapping[str, str]) -> str:
    """Return what the shell of a host runs."""
    variables = [f"{name}={value}" for name, value in (dict(job.env) | dict(settings)).items()]
    command = shlex.join(["env", *variables, *job.command])
    return _REMOTE.format(folder=shlex.quote(str(job.folder)), command=command)


def _connection(job: Job, hosts: Sequence[str], process: int, restarts: int) -> list[str]:
    address = with_port(job.coordinator or hosts[0].rpartition("@")[2])
    command = remote_command(job, process_settings(address, len(hosts), process, restarts))
    return ["ssh", *_OPTIONS, *_ALIVE, hosts[process], command]


def show(job: Job, hosts: Sequence[str]) -> str:
    """Return the command line of each host."""
    return "\n".join(shlex.join(_connection(job, hosts, process, 0)) for process in range(len(hosts))) + "\n"


def submit(job: Job, hosts: Sequence[str]) -> int:
    """Run the processes to the end of the job; return its exit code.

    An elastic run that lost hosts restarts on those that answer.
    """

    def start(count: int, restarts: int) -> Sequence[Process]:
        there = list(hosts) if count == len(hosts) else [host for host in hosts if answers(host)][:count]
        if not there:
            raise ConfigError(f"none of {', '.join(hosts)} answers: check the network, then launch again")
        if len(there) < job.fewest_hosts:
            raise ConfigError(
                f"--fewest-hosts is {job.fewest_hosts}, but fewer hosts answer ({', '.join(there)}): check the "
                "network, then launch again"
            )
        connect = partial(subprocess.Popen[bytes], stdin=subprocess.PIPE, start_new_session=True)
        return [
            RemoteProcess(host, connect(_connection(job, there, process, restarts)))
            for process, host in enumerate(there)
        ]

    return Supervisor(job, start, lambda: _saved_steps(job, hosts)).run()


def _saved_steps(job: Job, hosts: Sequence[str]) -> list[str]:
    """Return the names in the run's folder of checkpoints, as the first host that answers sees them."""
    for host in hosts:
        command = ["ssh", *_OPTIONS, host, f"ls -A {shlex.quote(str(job.checkpoints))}"]
        listed = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if listed.returncode != _UNREACHABLE:
            return listed.stdout.split()
    return []


def answers(host: str) -> bool:
    """Return whether a host accepts a connection."""
    command = ["ssh", *_OPTIONS, host, "true"]
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
