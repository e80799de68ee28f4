"""What the processes of a `jax.distributed` run tell each other, with a deadline on every wait.

Texts go through the coordination service, not over the devices: a collective has no deadline, and one from here could
meet a train step's own on the devices in another order in another process.
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

DEADLINE_S = 900.0  # for another process to come to where this one is: long enough for its compiler
_numbers = itertools.count()
_MARK = "|"  # between what an exchange is about and what is told


class MissingProcessError(AutoshardError):
    """Another process did not come to where this one waited for it.

    Attributes:
        processes: which.
        what: what was waited for.
        seconds: how long.
    """

    def __init__(self, message: str, *, processes: Sequence[int], what: str, seconds: float) -> None:
        super().__init__(message)
        self.processes, self.what, self.seconds = tuple(processes), what, seconds


def exchange(what: str, text: str, deadline_s: float | None = None) -> list[str]:
    """What each process tells at this point, by process. All processes call this in the same order.

    Args:
        what: what it is about, the same in every process; for errors.
        text: what this process tells.
        deadline_s: how long the others may take; `DEADLINE_S` by default.

    Raises:
        MissingProcessError: one has not come in time.
        AutoshardError: one came to another exchange: the processes run different code.
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [text]
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    number = next(_numbers)
    key = f"autoshard/exchange/{number}"
    _compat.tell_processes(f"{key}/{me}", f"{what}{_MARK}{text}")
    until = time.monotonic() + deadline_s
    found = [_compat.hear_process(f"{key}/{p}", max(until - time.monotonic(), 0.01)) for p in range(count)]
    missing = [process for process, said in enumerate(found) if said is None]
    if missing:
        raise MissingProcessError(
            f"{what}: {named(missing)} did not come within {deadline_s:g} s: gone, stopped, or busy with other work",
            processes=missing,
            what=what,
            seconds=deadline_s,
        )
    # Whoever has told this has read all of the exchange before.
    _compat.forget_told(f"autoshard/exchange/{number - 1}/{me}")
    parts = [str(said).partition(_MARK) for said in found]
    elsewhere = [process for process, (about, _, _) in enumerate(parts) if about != what]
    if elsewhere:
        raise AutoshardError(
            f"{what}: {named(elsewhere)} came to {parts[elsewhere[0]][0]!r} instead: each process must run the same "
            "code on the same settings"
        )
    return [told for _, _, told in parts]


def gathered(what: str, value: np.ndarray, deadline_s: float | None = None) -> np.ndarray:
    """The arrays of all processes, of one shape and dtype, [processes, ...].

    Raises:
        MissingProcessError: one has not come in time.
    """
    value = np.asarray(value)
    told = exchange(what, base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(), deadline_s)
    rows = [np.frombuffer(base64.b64decode(one), value.dtype).reshape(value.shape) for one in told]
    return np.stack(rows)


def named(processes: Sequence[int]) -> str:
    """`process 3`, `processes 1, 2`."""
    shown = ", ".join(map(str, processes[:8])) + (", ..." if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
