"""Lower bounds of the time that rows of the batch take in a step, without pricing the whole step.

    rows_us = kernels that take or return rows of the batch, and collectives that move rows (`StepCost.rows_us`)

It is a sum over operator classes. The first bound is the sum of the least times of their kernels, if their work is
divided over all devices (`OperatorPrices.least_us`). Then one class after another is priced, and its price replaces its
least time. Classes whose prices exceeded their least times the most under other layouts come first. So the prices of a
few classes show that a layout is slower than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autoshard.sharding.cost.constants import CLASSES_PER_BOUND
from autoshard.sharding.cost.equivalence_classes import OperatorClass, RowsOfBatch, SharedOperands
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout, Names
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.machines.topology import DeviceAssignment
from autoshard.spmdrules.ir.program import Op

Pricer = Callable[[int, OperatorClass, CanonicalLayout], tuple[Price, Names]]


class RowsTime:
    """The time that rows of the batch take in the steps of one program.

    Args:
        classes: the operator classes of the program.
        rows: which of them work on rows.
        trips: for each operator, how often it runs in a step.
        least_us: the least microseconds of one run of a class's kernel under any layout.
    """

    def __init__(
        self,
        classes: Sequence[OperatorClass],
        rows: RowsOfBatch,
        trips: np.ndarray,
        least_us: Callable[[OperatorClass], float],
    ):
        self._classes, self._rows, self._trips = classes, rows, trips
        self._numbers = [n for n, runs in enumerate(rows.runs) if runs]
        self._least = {n: least_us(classes[n]) * classes[n].runs for n in self._numbers}
        # Class -> the sum of its excess over the least time under the layouts so far, and the number of these layouts.
        self._excess = {n: (us, 1) for n, us in self._least.items()}

    def __call__(
        self,
        canonical: CanonicalLayout,
        assignment: DeviceAssignment,
        price: Pricer,
        can_hide: Callable[[Op, Move], bool],
    ) -> Iterator[float]:
        """Yield lower bounds in microseconds, from low to high. The last one counts the prices of all operators.

        Args:
            canonical: the layout.
            assignment: its device assignment.
            price: prices one run of the operator of a class, given the number of the class and the class.
            can_hide: whether compute may hide a collective of an operator. Such collectives are not counted.
        """
        total, moved = sum(self._least.values()), set()
        left, done, ranked = self._numbers, 0, 0
        while left:
            yield total
            if done >= 2 * ranked:  # the excess under other layouts may be known by now
                left, ranked = sorted(left, key=self._rank), max(done, 1)
            some, left = left[:CLASSES_PER_BOUND], left[CLASSES_PER_BOUND:]
            for number in some:
                found, names = price(number, self._classes[number], canonical)
                moves = [m for m in found.moves if not m.hops and not can_hide(self._classes[number].op, m)]
                time = found.time_us * self._classes[number].runs
                excess = time + self._moves_us(number, moves, names, assignment, moved) - self._least[number]
                total += excess
                known, count = self._excess[number]
                self._excess[number] = known + excess, count + 1
            done += len(some)
        yield total

    def _rank(self, number: int) -> float:
        excess, count = self._excess[number]
        return -excess / count

    def _moves_us(
        self, number: int, moves: Sequence[Move], names: Names, assignment: DeviceAssignment, moved: set[object]
    ) -> float:
        """Return the microseconds of a class's collectives. `moved` contains operands that other classes have moved."""
        each, found = self._classes[number], 0.0
        for move in moves:
            if not self._rows.are_moved(each.op, move.array):
                continue
            axes = tuple([a for name in move.axes for a in names[name]])
            runs = each.runs if move.array < 0 else self._new_runs(move, axes, each.shared[move.array], moved)
            if runs:
                links = assignment.links(move.kind, axes)
                found += links.time_us(move.local_bytes * links.factor) * runs
        return found

    def _new_runs(
        self, move: Move, axes: tuple[str, ...], operands: Sequence[SharedOperands], moved: set[object]
    ) -> float:
        """Return how often a step moves those of the operands that no other class has moved."""
        runs = 0.0
        for some in operands:
            if (key := (move.kind, axes, some.number)) not in moved:
                moved.add(key)
                runs += float(self._trips[some.first].sum())
        return runs
