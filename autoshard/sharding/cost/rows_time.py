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
from autoshard.sharding.machines.device_assignments import DeviceAssignment
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
        self._excess, self._layouts = self._least.copy(), dict.fromkeys(self._least, 1)
        self._counted: dict[tuple[int, int], bool] = {}  # class, array -> whether moves of the array are counted

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
            can_hide: whether compute may hide a collective of an operator, which depends on the array that it moves.
                Such collectives are not counted.
        """
        total, moved = sum(self._least.values()), set()
        left, done, ranked = self._numbers, 0, 0
        while left:
            yield total
            if done >= 2 * ranked:  # the excess under other layouts may be known by now
                means = {number: self._excess[number] / self._layouts[number] for number in left}
                left, ranked = sorted(left, key=means.__getitem__, reverse=True), max(done, 1)
            some, left = left[:CLASSES_PER_BOUND], left[CLASSES_PER_BOUND:]
            for number in some:
                each = self._classes[number]
                found, names = price(number, each, canonical)
                excess = found.time_us * each.runs - self._least[number]
                if moves := [m for m in found.moves if not m.hops and self._is_counted(number, m, can_hide)]:
                    excess += self._moves_us(each, moves, names, assignment, moved)
                total += excess
                self._excess[number] += excess
                self._layouts[number] += 1
            done += len(some)
        yield total

    def _is_counted(self, number: int, move: Move, can_hide: Callable[[Op, Move], bool]) -> bool:
        """Whether a collective of a class moves rows, and compute cannot hide it."""
        known = self._counted.get((number, move.array))
        if known is None:
            op = self._classes[number].op
            known = self._rows.are_moved(op, move.array) and not can_hide(op, move)
            self._counted[number, move.array] = known
        return known

    def _moves_us(
        self,
        each: OperatorClass,
        moves: Sequence[Move],
        names: Names,
        assignment: DeviceAssignment,
        moved: set[object],
    ) -> float:
        """Return the microseconds of a class's collectives. `moved` contains operands that other classes have moved."""
        found = 0.0
        for move in moves:
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
