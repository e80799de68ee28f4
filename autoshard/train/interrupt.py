"""SIGTERM and Ctrl-C as a wish to stop after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


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
