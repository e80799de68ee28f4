"""The stretches of a program: each loop body is one, and the code outside of all loops is one.

Compilers move asynchronous transfers only within their stretch. So only the compute of the same stretch can hide them.
Calls and branches belong to the code around them. The body of a loop within a stretch is not a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from autoshard.spmdrules.ir.program import Block, Op, Program


class Stretches:
    """The stretches of a program, and which classes of operators run in them.

    Attributes:
        ops: the operators, in the order of `Program.ops`.
        number: for each operator, the number of its stretch; 0 outside of loops.
        trips: for each operator, how often it runs in a step.
    """

    def __init__(self, program: Program, members: Sequence[Sequence[int]]):
        """Number the stretches.

        Args:
            program: the program.
            members: for each class of operators that takes time, the operators' numbers.
        """
        pairs = list(_ops_with_stretches(program.block))
        self.ops = [op for op, _ in pairs]
        self.number = np.array([stretch for _, stretch in pairs], int)
        self.trips = np.array([op.trips for op in self.ops])
        self._class = np.full(len(pairs), -1)
        for n, numbers in enumerate(members):
            self._class[numbers] = n

    def times(self, times_us: Sequence[float]) -> StretchTimes:
        """Return the compute time of each stretch.

        Args:
            times_us: microseconds of one run of each class of operators.
        """
        return StretchTimes(self, times_us)

    @cached_property
    def first_loop(self) -> int:
        """The number of the first loop; 0 if there is none."""
        return next((n for n, op in enumerate(self.ops) if any(block.loop for block in op.blocks)), 0)

    @cached_property
    def of_result(self) -> dict[int, int]:
        """Value -> the number of the first operator that has it as a result."""
        found: dict[int, int] = {}
        for n, op in enumerate(self.ops):
            for v in op.results:
                found.setdefault(v, n)
        return found

    @cached_property
    def timed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The operators that take time, ordered by stretch and then as in the program; their classes and stretches."""
        timed = np.flatnonzero(self._class >= 0)
        timed = timed[np.argsort(self.number[timed], kind="stable")]
        return timed, self._class[timed], self.number[timed]


class StretchTimes:
    """The compute time of each stretch of a program under one layout.

    Attributes:
        stretches: the stretches.
        times_us: microseconds of one run of each class of operators.
    """

    def __init__(self, stretches: Stretches, times_us: Sequence[float]):
        self.stretches, self.times_us = stretches, times_us

    @cached_property
    def _ended(self) -> tuple[np.ndarray, np.ndarray]:
        """For the operators that take time: the compute of their stretch up to their end, and their own compute."""
        _, classes, stretch = self.stretches.timed
        own = np.asarray(self.times_us, float)[classes]
        ended = np.cumsum(own)
        starts = np.flatnonzero(np.diff(stretch, prepend=-1))
        offsets = (ended - own)[starts]
        return ended - np.repeat(offsets, np.diff(np.append(starts, len(stretch)))), own

    def total_us(self, stretch: int) -> float:
        """Microseconds of compute in one run of a stretch."""
        ended, _ = self._ended
        last = int(np.searchsorted(self.stretches.timed[2], stretch, side="right")) - 1
        return float(ended[last]) if last >= 0 and self.stretches.timed[2][last] == stretch else 0.0

    def before_us(self, stretch: int, ops: np.ndarray) -> np.ndarray:
        """Microseconds of compute in one run of a stretch before each of these operators of it."""
        return self._until(stretch, ops, "left")

    def until_us(self, stretch: int, ops: np.ndarray) -> np.ndarray:
        """Microseconds of compute in one run of a stretch until each of these operators of it has ended."""
        return self._until(stretch, ops, "right")

    def _until(self, stretch: int, ops: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
        timed, _, stretch_of = self.stretches.timed
        first, last = np.searchsorted(stretch_of, stretch), np.searchsorted(stretch_of, stretch, side="right")
        at = np.searchsorted(timed[first:last], ops, side=side)
        return np.concatenate([[0.0], self._ended[0][first:last]])[at]


def _ops_with_stretches(block: Block) -> Iterator[tuple[Op, int]]:
    """Yield every operator, in the order of `Program.ops`, with the number of its stretch."""
    count = 0

    def visit(block: Block, stretch: int) -> Iterator[tuple[Op, int]]:
        nonlocal count
        for op in block.ops:
            yield op, stretch
            for inner in op.blocks:
                count += inner.loop
                yield from visit(inner, count if inner.loop else stretch)

    yield from visit(block, 0)
