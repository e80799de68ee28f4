"""Stop a run after the current step on SIGTERM, Ctrl-C or a cloud's notice, all processes after the same step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax

from autoshard.train.run import distributed

STOP_LATENCY_S = 2.0  # chosen: seconds until all processes notice a signal to one; a longer step delays it


class Interrupts:
    """Record the first signal in the `with` block instead of stopping; a second Ctrl-C stops at once.

    Attributes:
        received: Name of the signal, or a notice; None before.
    """

    def __init__(self) -> None:
        """Start without catching signals."""
        self.received: str | None = None
        self._number = 0
        self._previous: dict[int, Any] = {}

    @property
    def number(self) -> int:
        """Number of the signal that this process received, SIGTERM for a notice; 0 if none."""
        return self._number

    def notice(self, text: str) -> None:
        """Record that this machine will be stopped, unless a signal came before."""
        if self.received is None:
            self.received, self._number = text, int(signal.SIGTERM)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received, self._number = signal.Signals(number).name, number

    def __enter__(self) -> Interrupts:
        """Install the signal handlers; Python allows this only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class StopAgreement:
    """Decide whether all processes stop after a step, because any of them received a signal."""

    def __init__(self, interrupts: Interrupts, step: int, at_least_every: int) -> None:
        """Start at a step.

        Args:
            interrupts: Signals to this process.
            step: Steps already done.
            at_least_every: Maximum number of steps between two exchanges of the processes.
        """
        self._interrupts, self._every = interrupts, at_least_every
        self._exchanged, self._next, self._since = step, step + 1, time.perf_counter()

    def after(self, step: int, last: bool) -> bool:
        """Whether to stop after a step. Every process must call this after every step.

        An exchange costs a round trip. The step time of the slowest process therefore determines the step of the next
        exchange, so that a signal is noticed within about `STOP_LATENCY_S`.

        Args:
            step: Steps done.
            last: Whether it is the last step of the run.
        """
        if jax.process_count() > 1 and step < self._next and not last:
            return False
        step_seconds = (time.perf_counter() - self._since) / max(step - self._exchanged, 1)
        own = self._interrupts.number
        number, slowest = distributed.maximum_over_processes(f"step {step}: whether to stop", (own, step_seconds))
        if number and not own:
            self._interrupts.received = f"{signal.Signals(int(number)).name} in another process"
        self._exchanged, self._since = step, time.perf_counter()
        self._next = step + min(self._every, max(int(STOP_LATENCY_S / max(slowest, 1e-6)), 1))
        return number > 0
