"""One figure of an attached GPU, and the clock that measures it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    Attributes:
        section: the group of figures that it belongs to.
        case: what was measured.
        quantity: `time`, `rate`, `memory` or `tokens`.
        unit: of both values.
        measured: the median of the repeated runs.
        spread: the largest over the smallest of them; 1 where there is one.
        note: what else is to be known.
    """

    section: str
    case: str
    quantity: str
    unit: str
    measured: float
    spread: float = 1.0
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What predictions name: the case and the quantity."""
        return self.case, self.quantity


Predictions = dict[tuple[str, str], float]
"""The planner's value for the case and the quantity of a figure, in the figure's unit."""


@dataclass(frozen=True)
class Seconds:
    """The seconds of one call: the median of the repetitions, and the slowest over the fastest."""

    median: float
    spread: float


def seconds_of(call: Callable[[], Any], *, repeats: int = 5) -> Seconds:
    """Time a call. Each repetition queues calls for about a tenth of a second, which hides the launches.

    Untimed calls come first. A device runs its programs one after the other, so it is enough to wait for the last one.
    A call that copies between memories must wait itself.
    """
    jax.block_until_ready(call())
    once = _seconds(call, 1)
    calls = max(2, min(100, round(0.1 / max(once, 1e-6))))
    times = [_seconds(call, calls) for _ in range(repeats)]
    return Seconds(float(np.median(times)), max(times) / min(times))


def _seconds(call: Callable[[], Any], calls: int) -> float:
    begin, result = time.perf_counter(), None
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def compiled_together(lowered: dict[Any, Any], threads: int = 12) -> dict[Any, Any]:
    """Compile programs in threads. A program that cannot be compiled is left out, and the reason is printed."""

    def compiled(item: tuple[Any, Any]) -> tuple[Any, Any]:
        try:
            return item[0], item[1].compile()
        except jax.errors.JaxRuntimeError as error:  # such as: out of memory
            print(f"{item[0]}: {str(error).splitlines()[0][:200]}", flush=True)
            return item[0], None

    with ThreadPoolExecutor(threads) as pool:
        return {name: program for name, program in pool.map(compiled, lowered.items()) if program is not None}
