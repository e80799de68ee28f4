"""Lower bounds of the time of a step under a layout, without pricing the whole step.

    step_us >= exposed_us + sum over stretches of max(kernels_us, hideable_us / r)

    exposed_us   collectives that compute cannot hide
    kernels_us   kernels of the stretch
    hideable_us  collectives of the stretch that compute can hide. In one run of a stretch, they hide behind its compute
                 at most (`overlap`), and the rest is exposed
    r            the ratio of the most to the fewest runs of an operator of the stretch; 1 if all run equally often

It is a sum over operator classes. The first bound is the sum of the least times of their kernels, if their work is
divided over all devices (`OperatorPrices.least_us`). Then one class after another is priced, and its price replaces its
least time. Classes whose prices exceeded their least times the most under other layouts come first. So the prices of a
few classes show that a layout is slower than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.cost.constants import CLASSES_PER_BOUND, ROUNDING
from autoshard.sharding.cost.equivalence_classes import OperatorClass, SharedOperands
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout, Names
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.cost.stretches import Stretches
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.spmdrules.core.placement import ReshardKind
from autoshard.spmdrules.ir.program import Op

Pricer = Callable[[int, OperatorClass, CanonicalLayout], tuple[Price, Names]]
Timer = Callable[[ReshardKind, tuple[str, ...], float], tuple[float, bool]]
"""Returns the microseconds of a collective, and whether compute can hide it if it moves parameters or gradients.

Its arguments are the kind, the mesh axes, and the bytes of one device's operand."""
Total = Callable[[Sequence[float], Sequence[float], float, float], float]
"""Returns a bound. Its arguments are `kernels_us` and `hideable_us / r` of each stretch, and `exposed_us` in two parts.

The two parts are the time of the collectives of activations, and that of parameters and gradients."""
Runs = tuple[tuple[int, float], ...]
"""The stretches in which some operators run, each with the number of their runs in a step."""


class LeastTime:
    """Lower bounds of the time of the steps of one program.

    Args:
        classes: the operator classes of the program.
        stretches: its stretches.
        least_us: the least microseconds of one run of a class's kernel under any layout.
    """

    def __init__(
        self,
        classes: Sequence[OperatorClass],
        stretches: Stretches,
        least_us: Callable[[OperatorClass], float],
    ):
        self._classes, self._stretches = classes, stretches
        self._runs = [self._runs_of(each.members) for each in classes]
        # The runs of the collectives that reduce the results of each class.
        self._reducing = [
            runs if each.reduced_at is each.members else self._runs_of(each.reduced_at)
            for each, runs in zip(classes, self._runs, strict=True)
        ]
        self._least_once = [least_us(each) for each in classes]
        self._least = [0.0] * (int(stretches.number.max(initial=0)) + 1)
        for once, runs in zip(self._least_once, self._runs, strict=True):
            for stretch, count in runs:
                self._least[stretch] += once * count
        self._ratios = self._runs_ratios()
        # Class -> the sum of its excess over the least time under the layouts so far, and the number of these layouts.
        self._excess = {
            n: once * each.runs for n, (once, each) in enumerate(zip(self._least_once, classes, strict=True))
        }
        self._layouts = dict.fromkeys(self._excess, 1)
        self._moves_state: dict[tuple[int, int], bool] = {}  # class, array -> whether it is a parameter or gradient
        self._runs_of_shared: dict[int, Runs] = {}
        self._sharers: dict[int, list[int]] = {}  # values that operands share -> the classes that take them
        for number, each in enumerate(classes):
            for shared in {some.number for operand in each.shared for some in operand}:
                self._sharers.setdefault(shared, []).append(number)
        # Class -> those of these values that other classes take, too.
        self._shared: list[list[int]] = [[] for _ in classes]
        for shared, sharers in self._sharers.items():
            for number in sharers if len(sharers) > 1 else ():
                self._shared[number].append(shared)

    def __call__(
        self,
        canonical: CanonicalLayout,
        timer: Timer,
        price: Pricer,
        is_state: Callable[[Op, Move], bool],
        total_us: Total | None = None,
    ) -> Iterator[float]:
        """Yield lower bounds in microseconds, from low to high. The last one counts the prices of all operators.

        Args:
            canonical: the layout.
            timer: gives the time of collectives.
            price: prices one run of the operator of a class, given the number of the class and the class.
            is_state: whether an array that an operator moves is a parameter or a gradient.
            total_us: the bound. By default, it is the one above.
        """
        total_us = total_us or _total_us
        kernels, hideable = self._least.copy(), [0.0] * len(self._least)
        exposed = [0.0, 0.0]  # of activations, and of state
        moved = _Moved(self._sharers)
        left, done, ranked = [*range(len(self._classes))], 0, 0
        while left:
            yield ROUNDING * total_us(kernels, hideable, *exposed)
            if done >= 2 * ranked:  # the excess under other layouts may be known by now
                means = {number: self._excess[number] / self._layouts[number] for number in left}
                left, ranked = sorted(left, key=means.__getitem__, reverse=True), max(done, 1)
            some, left = left[:CLASSES_PER_BOUND], left[CLASSES_PER_BOUND:]
            for number in some:
                found, names = price(number, self._classes[number], canonical)
                more_us = found.time_us - self._least_once[number]
                excess = more_us * self._classes[number].runs
                for stretch, count in self._runs[number]:
                    kernels[stretch] += more_us * count
                for move in found.moves:
                    if move.hops:  # on a ring, beside the compute of its own operator
                        continue
                    axes = tuple([a for name in move.axes for a in names[name]])
                    once_us, hides = timer(move.kind, axes, move.local_bytes)
                    of_state = self._is_of_state(number, move, is_state)
                    if move.array < 0:
                        moved.charged.append(_Charge(self._reducing[number], once_us, of_state, hides and of_state))
                        continue
                    for operands in self._classes[number].shared[move.array]:
                        charge = _Charge(self._runs_of_operands(operands), once_us, of_state, hides and of_state)
                        moved.add(number, operands.number, (move.kind, axes), charge)
                moved.settle(number, self._shared[number])
                for charge in moved.charged:
                    for stretch, count in charge.runs:
                        excess += charge.once_us * count
                        if charge.is_hideable:
                            hideable[stretch] += charge.once_us * count / self._ratios[stretch]
                        else:
                            exposed[charge.of_state] += charge.once_us * count
                moved.charged.clear()
                self._excess[number] += excess
                self._layouts[number] += 1
            done += len(some)
        yield ROUNDING * total_us(kernels, hideable, *exposed)

    def _is_of_state(self, number: int, move: Move, is_state: Callable[[Op, Move], bool]) -> bool:
        """Return whether a collective of an operator class moves a parameter or a gradient."""
        known = self._moves_state.get((number, move.array))
        if known is None:
            known = self._moves_state[number, move.array] = is_state(self._classes[number].op, move)
        return known

    def _runs_of_operands(self, operands: SharedOperands) -> Runs:
        found = self._runs_of_shared.get(operands.number)
        if found is None:
            found = self._runs_of_shared[operands.number] = self._runs_of(operands.first)
        return found

    def _runs_of(self, ops: np.ndarray) -> Runs:
        """Return the stretches of operators, with the numbers of their runs in a step."""
        runs = np.bincount(self._stretches.number[ops], self._stretches.trips[ops])
        return tuple([(stretch, count) for stretch, count in enumerate(runs.tolist()) if count])

    def _runs_ratios(self) -> list[float]:
        """For each stretch, return the ratio of the most to the fewest runs of an operator."""
        number, trips = self._stretches.number, self._stretches.trips
        most, fewest = np.zeros(len(self._least)), np.full(len(self._least), np.inf)
        np.maximum.at(most, number, trips)
        np.minimum.at(fewest, number[trips > 0], trips[trips > 0])
        return np.where(most > 0, most / fewest, 1.0).tolist()


def _total_us(
    kernels: Sequence[float], hideable: Sequence[float], exposed_activations: float, exposed_state: float
) -> float:
    return exposed_activations + exposed_state + sum(map(max, kernels, hideable))


@shown
@dataclass(frozen=True)
class _Charge:
    """The time of a collective.

    Attributes:
        runs: how often it runs.
        once_us: microseconds of one run.
        of_state: whether it moves parameters or gradients.
        is_hideable: whether compute can hide it.
    """

    runs: Runs
    once_us: float
    of_state: bool
    is_hideable: bool


class _Moved:
    """Collectives of values that several classes take. The step counts each once, for the first class that needs it.

    Classes are priced in any order. They may move different amounts of an activation, so its collective is charged when
    no earlier class can still need it. The amount of a parameter or a gradient, whose collectives compute can hide, is
    the same for all classes. It is charged at once.

    Attributes:
        charged: the collectives that are charged since the list was last cleared.
    """

    def __init__(self, sharers: Mapping[int, Sequence[int]]):
        self._sharers = sharers
        self._done: set[int] = set()
        # Shared value -> the kind and the mesh axes of a collective -> the first class that runs it, and its time.
        self._claims: dict[int, dict[tuple[str, tuple[str, ...]], tuple[int, _Charge | None]]] = {}
        self.charged: list[_Charge] = []

    def add(self, number: int, shared: int, key: tuple[str, tuple[str, ...]], charge: _Charge) -> None:
        """Note that a class moves a shared value by the collective `key`: its kind and its mesh axes."""
        claims = self._claims.setdefault(shared, {})
        if charge.is_hideable or len(self._sharers[shared]) == 1:
            if key not in claims:
                claims[key] = number, None
                self.charged.append(charge)
        elif key not in claims or claims[key][0] > number:
            claims[key] = number, charge

    def settle(self, number: int, values: Sequence[int]) -> None:
        """Note that a class is priced. Charge the collectives of its shared values that no earlier class can need."""
        self._done.add(number)
        for shared in values:
            if claims := self._claims.get(shared):
                left = next((n for n in self._sharers[shared] if n not in self._done), inf)
                for key, (first, charge) in claims.items():
                    if charge is not None and first <= left:
                        self.charged.append(charge)
                        claims[key] = first, None
