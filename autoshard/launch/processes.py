"""Run the processes of a job from here, and start them again when one is lost.

exit codes                              what follows
all 0                                   the run is finished
75, or killed by a signal               the processes start again, on as many hosts as are left if the run is elastic
any other                               an error: it is not repeated

When a process is lost, JAX aborts the others. Their hosts still work, so a restart uses them.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from autoshard._processes import EXIT_RESTART
from autoshard._shown import shown
from autoshard.launch.constants import FAILED_S, SAVE_S
from autoshard.launch.job import Job

_POLL_S = 0.1  # chosen: seconds between two looks at the processes
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)


@shown
class Process(Protocol):
    """A process of the job, here or on another host."""

    name: str

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it at once."""


Start = Callable[[int, int], Sequence[Process]]
"""Starts the processes of one attempt, given the number of hosts and of restarts so far."""

Saved = Callable[[], Sequence[str]]
"""Lists what the run has saved. It differs between two attempts if the first of them saved a step."""


@shown
@dataclass
class LocalProcess:
    """A child process.

    Attributes:
        name: Its name in messages.
        child: The process. It is in a session of its own, so that Ctrl-C in a terminal reaches only the launcher.
    """

    name: str
    child: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> LocalProcess:
        """Start a command with these environment variables and no others."""
        return cls(name, subprocess.Popen(command, env=dict(env), cwd=cwd, start_new_session=True))

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self.child.poll()

    def stop(self) -> None:
        """Send SIGTERM."""
        self.child.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.child.kill()


class Supervisor:
    """Runs a job's processes to the end of the job."""

    def __init__(
        self, job: Job, start: Start, saved: Saved, *, failed_s: float = FAILED_S, save_s: float = SAVE_S
    ) -> None:
        """Store the settings; nothing starts before `run`.

        Args:
            job: The job.
            start: Starts the processes of one attempt.
            saved: Lists what the run has saved.
            failed_s: Seconds that the other processes have to end once one has failed.
            save_s: Seconds that processes have to save and end after a signal.
        """
        self._job, self._start, self._saved = job, start, saved
        self._failed_s, self._save_s = failed_s, save_s
        self._signal: int | None = None
        self._hurry = False

    def run(self) -> int:
        """Run until the job is finished, fails, or is stopped by a signal to this process.

        Returns:
            0 if the run is finished, 75 if a signal stopped it or too many attempts saved no new step, 130 after
            Ctrl-C, else the code of the process that failed.
        """
        hosts, restarts, failures, saved = self._job.hosts, 0, 0, self._saved()
        with self._signals():
            while True:
                processes = self._start(hosts, restarts)
                codes = self._wait(processes)
                failed = {p.name: code for p, code in zip(processes, codes, strict=True) if code}
                if not failed:
                    return 0
                errors = {name: code for name, code in failed.items() if 0 < code < 128 and code != EXIT_RESTART}
                if errors:
                    name, code = next(iter(errors.items()))
                    _say(f"{name} ended with exit code {code}, which is an error: the run is not started again")
                    return code
                if self._signal is not None:
                    return 130 if self._signal == signal.SIGINT else EXIT_RESTART
                killed = {name: code for name, code in failed.items() if code < 0 or code > 128}
                lost = [name for name, code in killed.items() if code not in _ABORTED]
                what = f"lost {', '.join(lost or killed)}" if killed else "the run asked for a restart"
                failures = failures + 1 if (now := self._saved()) == saved else 0
                saved = now
                if self._job.max_failures and failures >= self._job.max_failures:
                    _say(f"{what}; {failures} attempts in a row saved no new step: the run is not started again")
                    return EXIT_RESTART
                if self._job.fewest_hosts < self._job.hosts:
                    hosts = max(len(processes) - len(lost), self._job.fewest_hosts)
                restarts += 1
                _say(f"{what}; restart {restarts}, with {hosts} of {self._job.hosts}")

    def _wait(self, processes: Sequence[Process]) -> list[int]:
        """Wait for all processes; return their codes. Those that were killed here did not fail, so they get code 75."""
        asked: float | None = None  # when the processes were asked to stop
        failed: float | None = None  # when the first one failed
        killed: set[str] = set()
        while True:
            codes = [process.poll() for process in processes]
            running = [process for process, code in zip(processes, codes, strict=True) if code is None]
            if not running:
                return [
                    EXIT_RESTART if p.name in killed else code or 0 for p, code in zip(processes, codes, strict=True)
                ]
            now = time.monotonic()
            if self._signal is not None and asked is None:
                asked = now
                for process in running:
                    process.stop()
            if failed is None and any(codes):
                failed = now
            late = asked is not None and (now - asked > self._save_s or self._hurry)
            if late or (asked is None and failed is not None and now - failed > self._failed_s):
                for process in running:
                    killed.add(process.name)
                    process.kill()
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def remember(number: int, frame: FrameType | None) -> None:
            self._hurry = self._signal is not None and number == signal.SIGINT  # the second Ctrl-C
            self._signal = number

        # A signal that this process ignores from its start, such as under nohup, stays ignored.
        stops = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, remember) for number in stops}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"autoshard launch: {text}", file=sys.stderr, flush=True)
