"""Exchanges texts and arrays between the processes of a `jax.distributed` run, with a deadline on every wait.

They go through the coordination service, not over the devices. A collective has no deadline, and it could run in a
different order relative to a train step's collectives in different processes.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Sequence

import jax
import numpy as np

from autoshard import _compat
from autoshard.errors import AutoshardError

DEADLINE_S = 900.0  # for another process to reach the same call; chosen: long enough to compile a large program
COORDINATOR_PORT = 8476  # of process 0, where each host has one process; source: JAX's own default on TPUs
EXIT_RESTART = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, run the command again
RESTARTS = "AUTOSHARD_RESTARTS"  # environment variable: how often a launcher has started the run again
_numbers = itertools.count()  # numbers the exchanges, which every process makes in the same order
_SEPARATOR = "|"  # between the subject of an exchange and its text


class MissingProcessError(AutoshardError):
    """Another process did not reach a common call in time.

    Attributes:
        processes: indices of the missing processes.
        what: the subject of the exchange.
        seconds: how long this process waited.
    """

    def __init__(self, message: str, *, processes: Sequence[int], what: str, seconds: float) -> None:
        super().__init__(message)
        self.processes, self.what, self.seconds = tuple(processes), what, seconds


def exchange(what: str, text: str, deadline_s: float | None = None) -> list[str]:
    """Exchanges a text with all processes. Every process must make the same calls in the same order.

    Args:
        what: the subject, the same in every process; named in errors.
        text: this process's text.
        deadline_s: how long to wait for the others, in seconds; defaults to `DEADLINE_S`.

    Returns:
        The text of each process, by process index.

    Raises:
        MissingProcessError: if a process did not make the call in time.
        AutoshardError: if a process made an exchange about something else: the processes run different code.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [text]
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    number = next(_numbers)
    key = f"autoshard/exchange/{number}"
    _compat.publish_text(f"{key}/{me}", f"{what}{_SEPARATOR}{text}")
    until = time.monotonic() + deadline_s
    found = [_compat.wait_for_text(f"{key}/{p}", max(until - time.monotonic(), 0.01)) for p in range(count)]
    missing = [process for process, entry in enumerate(found) if entry is None]
    if missing:
        raise MissingProcessError(
            f"{what}: {processes_text(missing)} did not arrive within {deadline_s:g} s (ended, stopped, or busy)",
            processes=missing,
            what=what,
            seconds=deadline_s,
        )
    # A process that made this exchange has read all texts of the previous one, so this process's can be deleted.
    _compat.delete_text(f"autoshard/exchange/{number - 1}/{me}")
    parts = [str(entry).partition(_SEPARATOR) for entry in found]
    elsewhere = [process for process, (subject, _, _) in enumerate(parts) if subject != what]
    if elsewhere:
        raise AutoshardError(
            f"{what}: {processes_text(elsewhere)} exchanged {parts[elsewhere[0]][0]!r} instead. Each process "
            "must run the same code with the same settings"
        )
    return [text for _, _, text in parts]


def gather(what: str, value: np.ndarray, deadline_s: float | None = None) -> np.ndarray:
    """Gathers an array of the same shape and dtype from all processes, stacked as `[processes, ...]`.

    Raises:
        MissingProcessError: if a process did not make the call in time.
    """
    value = np.asarray(value)
    texts = exchange(what, base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(), deadline_s)
    rows = [np.frombuffer(base64.b64decode(text), value.dtype).reshape(value.shape) for text in texts]
    return np.stack(rows)


def processes_text(processes: Sequence[int]) -> str:
    """Names processes in a message: `process 3`, `processes 1, 2`."""
    shown = ", ".join(map(str, processes[:8])) + (", ..." if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
