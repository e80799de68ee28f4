"""An end to waiting for a process that does not come.

A step waits for the other processes inside of a collective, which has no deadline. Beside it a thread of each process
tells the others that it is alive and at which step, and ends its process where a step takes too long: it says which
process is silent or behind, dumps the stacks of all threads, and exits with the code that launchers read as "start me
again".
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
from autoshard._processes import named

RESTART = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the command, run it again
_PREFIX = "autoshard/beat/"
_BROKEN = re.compile(r"gloo|connection (closed|reset|refused)|broken pipe|UNAVAILABLE|heartbeat|coordination", re.I)


class Watchdog:
    """Ends the process where `beat` is not called for `deadline_s` in the `with` block; idle in a lone process.

    While it is `paused`, only where another process has been silent as well.
    """

    def __init__(self, deadline_s: float, *, leave: Callable[[int], None] = os._exit) -> None:
        """Not watching yet.

        Args:
            deadline_s: seconds that a step may take.
            leave: ends the process.
        """
        self.deadline_s = deadline_s
        self._leave = leave
        self._step = 0
        self._since = time.monotonic()
        self._paused = 0
        self._ended = threading.Event()

    @property
    def interval_s(self) -> float:
        """Seconds between two signs of life."""
        return min(5.0, self.deadline_s / 8)

    def beat(self, step: int | None = None) -> None:
        """Something was done: the deadline starts anew."""
        self._step = self._step if step is None else step
        self._since = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in the `with` block may take longer, as long as the other processes are there."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            self.beat()

    def __enter__(self) -> Watchdog:
        """Start to watch."""
        self.beat()
        if jax.process_count() > 1:
            # Apart: telling waits for the process that coordinates the others, which may be the one that stands still.
            for work in (self._tell, self._watch):
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
                give_up(
                    f"step {self._step + 1} did not end within {self.deadline_s:g} s: {self.suspects()}", self._leave
                )
            # A disk may be slow for longer; a process that is gone does not come back. One silence may be a long call.
            if all(self._silent() for _ in range(3)) and self._paused:
                give_up(f"waiting after step {self._step}: {self.suspects()}", self._leave)

    def _tell(self) -> None:
        for beat in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator is gone: the deadline will tell
                _compat.tell_processes(f"{_PREFIX}{jax.process_index()}", f"{beat} {self._step}", again=True)
            if self._ended.wait(self.interval_s):
                return

    def _listen(self) -> tuple[list[int], dict[int, tuple[int, int]] | None]:
        """The other processes that are silent for a while, and what was heard; None where nobody answers."""
        first = _heard(self.interval_s)
        time.sleep(2.5 * self.interval_s)
        second = _heard(self.interval_s)
        if first is None or second is None:
            return [0], None
        others = [p for p in range(jax.process_count()) if p != jax.process_index()]
        return [p for p in others if first.get(p) == second.get(p)], second

    def _silent(self) -> list[int]:
        return self._listen()[0]

    def suspects(self) -> str:
        """Which processes are silent, or else behind, as far as can be told."""
        silent, second = self._listen()
        if second is None:
            return "process 0, which coordinates the others, does not answer"
        others = [p for p in range(jax.process_count()) if p != jax.process_index()]
        if silent:
            seen = ", ".join(f"{p} at step {second[p][1]}" for p in silent if p in second)
            return f"{named(silent)} gave no sign of life{f' (last seen: {seen})' if seen else ''}"
        behind = [p for p in others if second[p][1] < self._step]
        if behind:
            return f"{named(behind)} is alive and behind, at step {min(second[p][1] for p in behind)}"
        return "all processes are alive and at that step: it is slow, or they wait for each other"


def _heard(seconds: float) -> dict[int, tuple[int, int]] | None:
    """Each process's count of signs of life, and its step; None where the coordinator does not answer."""
    answer: list[dict[str, str]] = []

    def ask() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            answer.append(_compat.told_below(_PREFIX))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(max(seconds, 1.0))
    if not answer:
        return None
    parts = {int(process): text.split() for process, text in answer[0].items()}
    return {process: (int(beats), int(step)) for process, (beats, step) in parts.items()}


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of the runtime is another process's end: its connections break, in words of their own."""
    return jax.process_count() > 1 and _BROKEN.search(str(error)) is not None


def give_up(message: str, leave: Callable[[int], None] = os._exit) -> NoReturn:
    """Ends this process at once: what other threads and exit handlers wait for will not come.

    Args:
        message: why.
        leave: ends the process.
    """
    print(f"autoshard: process {jax.process_index()} gives up: {message}", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    sys.stdout.flush()
    if jax.process_index() == 0:
        # The others ask this process which one is missing, and are ended by JAX as soon as it is gone.
        time.sleep(5.0)
    leave(RESTART)
    raise SystemExit(RESTART)
