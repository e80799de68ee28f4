"""SIGTERM and Ctrl-C as a wish to stop after the current step, of one process or of all together."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax

from autoshard.train.run import distributed

HEARD_WITHIN_S = 2.0  # or one step, where that takes longer


class Interrupts:
    """While in the `with` block, the first signal is remembered; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        """Nothing is caught yet."""
        self.received: str | None = None
        self._previous: dict[int, Any] = {}

    @property
    def number(self) -> int:
        """Of the signal that this process received; 0 where there was none."""
        known = signal.Signals.__members__
        return int(known[self.received]) if self.received is not None and self.received in known else 0

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __enter__(self) -> Interrupts:
        """Catch the signals; Python lets only the main thread do so."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        """Put back what was there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Stopping:
    """Whether all processes stop after a step: because of a signal to any of them, and all after the same one."""

    def __init__(self, interrupts: Interrupts, step: int, at_least_every: int) -> None:
        """Start.

        Args:
            interrupts: Signals to this process.
            step: Steps that are done.
            at_least_every: Steps after which the processes ask each other, however short they are.
        """
        self._interrupts, self._every = interrupts, at_least_every
        self._asked, self._next, self._since = step, step + 1, time.perf_counter()

    def after(self, step: int, last: bool) -> bool:
        """Whether to stop after a step; every process asks after every step.

        As asking costs a round trip, the next time that they do is decided by the pace of the slowest.
        """
        if jax.process_count() > 1 and step < self._next and not last:
            return False
        pace = (time.perf_counter() - self._since) / max(step - self._asked, 1)
        mine = self._interrupts.number
        number, slowest = distributed.largest(f"step {step}: whether to stop", (mine, pace))
        if number and not mine:
            self._interrupts.received = f"{signal.Signals(int(number)).name} in another process"
        self._asked, self._since = step, time.perf_counter()
        self._next = step + min(self._every, max(int(HEARD_WITHIN_S / max(slowest, 1e-6)), 1))
        return number > 0
