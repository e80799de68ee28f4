"""Detect lost processes and exit for a restart.

A step waits for the other processes inside a collective, which has no deadline. Each process therefore has two
background threads. One sends heartbeats with the current step. The other ends the process if a step takes too long: it
reports which process is silent or behind, dumps the stacks of all threads, and exits with the code that tells launchers
to start the process again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import jax

from autoshard import _compat
from autoshard._processes import EXIT_RESTART, processes_text

_PREFIX = "autoshard/beat/"
_BROKEN = re.compile(r"gloo|connection (closed|reset|refused)|broken pipe|UNAVAILABLE|heartbeat|coordination", re.I)


class Watchdog:
    """End the process if `beat` is not called for `deadline_s` within the `with` block.

    While it is `paused`, the process ends only if another process is silent too. A run of one process is not watched.
    """

    def __init__(self, deadline_s: float, *, leave: Callable[[int], None] = os._exit) -> None:
        """Store the settings; watching starts with the `with` block.

        Args:
            deadline_s: maximum time of a step, in seconds.
            leave: ends the process with an exit code.
        """
        self.deadline_s = deadline_s
        self._leave = leave
        self._step = 0
        self._since = time.monotonic()
        self._paused = 0
        self._ended = threading.Event()

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats: an eighth of the deadline, at most 5 s. Chosen, not measured."""
        return min(5.0, self.deadline_s / 8)

    def beat(self, step: int | None = None) -> None:
        """Restart the deadline, because the run made progress.

        Args:
            step: Steps done; None leaves the number as it is.
        """
        self._step = self._step if step is None else step
        self._since = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the deadline in the `with` block as long as no other process is silent."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self.beat()

    def __enter__(self) -> Watchdog:
        """Start watching."""
        self.beat()
        if jax.process_count() > 1:
            # Two threads, because sending a heartbeat blocks if the coordinating process is the one that hangs.
            for work in (self._send_heartbeats, self._watch):
                threading.Thread(target=work, name=f"autoshard-watchdog{work.__name__}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self.interval_s):
            if time.monotonic() - self._since <= self.deadline_s:
                continue
            if not self._paused:
                exit_for_restart(
                    f"step {self._step + 1} did not end within {self.deadline_s:g} s: {self.suspects()}", self._leave
                )
            # In a pause, a slow disk may take longer than the deadline, but a lost process does not come back. One
            # silent interval may be a long call, so three are required.
            if all(self._silent() for _ in range(3)) and self._paused:
                exit_for_restart(f"waiting after step {self._step}: {self.suspects()}", self._leave)

    def _send_heartbeats(self) -> None:
        for beat in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is lost: the deadline reports it
                _compat.publish_text(f"{_PREFIX}{jax.process_index()}", f"{beat} {self._step}", again=True)
            if self._ended.wait(self.interval_s):
                return

    def _listen(self) -> tuple[list[int], dict[int, tuple[int, int]] | None]:
        """Compare the heartbeats before and after a wait of two and a half intervals.

        Returns:
            The other processes without a new heartbeat, and the last heartbeats; process 0 and None if the coordinator
            does not answer.
        """
        first = _heartbeats(self.interval_s)
        time.sleep(2.5 * self.interval_s)
        second = _heartbeats(self.interval_s)
        if first is None or second is None:
            return [0], None
        others = [p for p in range(jax.process_count()) if p != jax.process_index()]
        return [p for p in others if first.get(p) == second.get(p)], second

    def _silent(self) -> list[int]:
        return self._listen()[0]

    def suspects(self) -> str:
        """Describe which processes are silent or, if none is, which are behind."""
        silent, second = self._listen()
        if second is None:
            return "process 0, which coordinates the others, does not answer"
        others = [p for p in range(jax.process_count()) if p != jax.process_index()]
        if silent:
            last = ", ".join(f"{p} at step {second[p][1]}" for p in silent if p in second)
            return f"{processes_text(silent)} sends no heartbeat{f' (last: {last})' if last else ''}"
        behind = [p for p in others if second[p][1] < self._step]
        if behind:
            return f"{processes_text(behind)} is alive but behind, at step {min(second[p][1] for p in behind)}"
        return "all processes are alive and at that step: the step is slow, or they wait for each other"


def _heartbeats(seconds: float) -> dict[int, tuple[int, int]] | None:
    """Return the number of heartbeats and the step of each process; None if the coordinator does not answer.

    Args:
        seconds: maximum time to wait for the answer; at least one second.
    """
    answer: list[dict[str, str]] = []

    def read() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            answer.append(_compat.texts_under(_PREFIX))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(max(seconds, 1.0))
    if not answer:
        return None
    parts = {int(process): text.split() for process, text in answer[0].items()}
    return {process: (int(beats), int(step)) for process, (beats, step) in parts.items()}


def is_lost_peer(error: BaseException) -> bool:
    """Whether a runtime error means that another process was lost, judged by words of broken connections."""
    return jax.process_count() > 1 and _BROKEN.search(str(error)) is not None


def exit_for_restart(message: str, leave: Callable[[int], None] = os._exit) -> NoReturn:
    """End this process at once with exit code 75, without waiting for other threads or exit handlers, which may hang.

    Args:
        message: the reason.
        leave: ends the process with an exit code.
    """
    print(f"autoshard: process {jax.process_index()} gives up: {message}", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    sys.stdout.flush()
    if jax.process_index() == 0:
        # Process 0 answers the others, who ask which process is silent. JAX ends them once it is gone. 5 s are chosen.
        time.sleep(5.0)
    leave(EXIT_RESTART)
    raise SystemExit(EXIT_RESTART)
