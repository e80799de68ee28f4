"""The part of communication that compute does not hide.

A collective that moves parameters or gradients runs beside the compute of its own stretch (`stretches`), if the chip's
compiler makes its kind asynchronous (`Chip.hides`). All others are exposed. In one run of a stretch,

    a gather     is needed by an operator. Gathers run one after another from the start of the stretch, in the order of
                 the operators that need them. An operator waits until its gathers have ended:
                     wait = max over gathers of (time of this gather and of all before it - compute before its operator)
    a reduction  begins after the operator that computes its operand. Reductions run one after another. Compute waits
                 for them at the end of the stretch:
                     wait = max over reductions of (time of this one and of all after it - compute after its operator)
    sequential   with gathers one after another (`lower.gathers.gather_order`), a gather begins when two things have
                 ended: the gather before it, and the second to last of the uses before it. Its operator waits for it.
    prefetch     a gather for the next iteration (`lower.gathers.prefetched_scan`) is needed at the end of the stretch.
                 Each time its loop starts, one more run is exposed: that for the first iteration.
    together     gathers and reductions use the same links. If the time hidden by these rules exceeds the compute of
                 the stretch, the excess is exposed, too.

So the first gather of a loop body and its last reduction are exposed, however much compute there is in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.cost.stretches import StretchTimes


@shown
@dataclass(frozen=True, eq=False)
class Place:
    """Where a collective runs.

    Attributes:
        ops: the numbers of its operators.
        is_before: whether the operators need its result, rather than compute its operand.
        starts: for each operator, how often the loop starts that runs the collective one iteration early; 0 where none
            does. By default, none does.
    """

    ops: np.ndarray
    is_before: bool
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Overlap:
    """What compute can hide under one layout.

    Args:
        places: for each collective, where it runs; None if compute cannot hide it.
        times: the compute time of each stretch.
        sequential: whether each gather waits for the second to last use.
        copies_us: stretch -> microseconds that one run of it copies gathered parameters; collectives run beside these.
    """

    def __init__(
        self,
        places: Sequence[Place | None],
        times: StretchTimes,
        *,
        sequential: bool = False,
        copies_us: Mapping[int, float] | None = None,
    ):
        self._count = len(places)
        found: defaultdict[int, _Found] = defaultdict(_Found)
        self._starts = np.zeros(self._count)  # of the loops that run a collective early
        stretch_of = times.stretches.number
        for n, place in enumerate(places):
            if place is None:
                continue
            numbers = stretch_of[place.ops]
            if not len(place.starts) and len(numbers) and (len(numbers) == 1 or (numbers == numbers[0]).all()):
                some = found[int(numbers[0])]
                (some.gathers if place.is_before else some.reductions).append((n, place.ops))
                continue
            starts = place.starts if len(place.starts) else np.zeros(len(place.ops))
            self._starts[n] = starts.sum()
            for stretch in sorted(set(numbers.tolist())):
                here, some = numbers == stretch, found[stretch]
                if not place.is_before:
                    some.reductions.append((n, place.ops[here]))
                    continue
                for kind, chosen in ((some.gathers, here & (starts == 0)), (some.early, here & (starts > 0))):
                    if chosen.any():
                        kind.append((n, place.ops[chosen]))
        copies = copies_us or {}
        self._stretches = [
            _Stretch(stretch, some, times, sequential, copies.get(stretch, 0.0)) for stretch, some in found.items()
        ]

    def exposed_us(self, once_us: Sequence[float]) -> np.ndarray:
        """Return the exposed microseconds of each collective in a step.

        Args:
            once_us: microseconds of one run of each collective, 0 for those that compute cannot hide.
        """
        once = np.asarray(once_us, float)
        exposed = once * self._starts
        for stretch in self._stretches:
            stretch.add_exposed(exposed, once)
        return exposed

    def waiting(self, once_us: Sequence[float]) -> set[tuple[int, int]]:
        """Return (collective, operator) for each operator that waits for a gather of its own stretch.

        Args:
            once_us: as for `exposed_us`.
        """
        once = np.asarray(once_us, float)
        return {pair for stretch in self._stretches for pair in stretch.waiting(once)}


@shown
@dataclass
class _Found:
    """The collectives of one stretch that compute can hide, each with the operators of the stretch that it belongs to.

    Attributes:
        gathers: the operators need their results.
        early: the operators need their results one iteration later.
        reductions: the operators compute their operands.
    """

    gathers: list[tuple[int, np.ndarray]] = field(default_factory=list)
    early: list[tuple[int, np.ndarray]] = field(default_factory=list)
    reductions: list[tuple[int, np.ndarray]] = field(default_factory=list)


class _Stretch:
    """The collectives of one stretch that compute can hide.

    Args:
        number: the number of the stretch.
        found: the collectives.
        times: the compute time of each stretch.
        sequential: whether each gather waits for the second to last use.
        copies_us: microseconds of copies at its end.
    """

    def __init__(self, number: int, found: _Found, times: StretchTimes, sequential: bool, copies_us: float):
        self.sequential = sequential
        self.total = times.total_us(number) + copies_us
        (now, needing), (early, needing_later) = _flat(found.gathers), _flat(found.early)
        self.needing, end = needing, np.full(len(early), self.total)
        self.gathers = np.concatenate([now, early])
        self.before = np.concatenate([times.before_us(number, needing), end])
        self.until = np.concatenate([times.until_us(number, needing), end])
        # The last reduction comes first, because waits are counted from the end of the stretch.
        numbers, computing = _flat(found.reductions)
        self.reductions, computing = numbers[::-1], computing[::-1]
        self.after = self.total - times.until_us(number, computing)
        trips = times.stretches.trips
        self.gather_trips, self.reduction_trips = trips[np.concatenate([needing, needing_later])], trips[computing]

    def add_exposed(self, exposed: np.ndarray, once_us: np.ndarray) -> None:
        """Add the exposed microseconds of a step to those of each collective."""
        gathers, reductions = once_us[self.gathers], once_us[self.reductions]
        reduction_waits, gather_waits = waits_of(reductions, self.after), self._gather_waits(once_us)
        hidden = float((gathers - gather_waits).sum() + (reductions - reduction_waits).sum())
        if hidden > self.total:
            share = 1 - self.total / hidden
            gather_waits = gather_waits + share * (gathers - gather_waits)
            reduction_waits = reduction_waits + share * (reductions - reduction_waits)
        np.add.at(exposed, self.gathers, gather_waits * self.gather_trips)
        np.add.at(exposed, self.reductions, reduction_waits * self.reduction_trips)

    def waiting(self, once_us: np.ndarray) -> list[tuple[int, int]]:
        """Return (collective, operator) for each operator that waits for a gather."""
        late = len(self.needing)
        waits = self._gather_waits(once_us)[:late] > 0
        return list(zip(self.gathers[:late][waits].tolist(), self.needing[waits].tolist(), strict=True))

    def _gather_waits(self, once_us: np.ndarray) -> np.ndarray:
        if self.sequential:
            return sequential_waits(once_us[self.gathers], self.before, self.until)
        return waits_of(once_us[self.gathers], self.before)


def waits_of(times_us: np.ndarray, compute_us: np.ndarray) -> np.ndarray:
    """Return how long the user of each of several collectives, which run one after another, waits for it.

    Args:
        times_us: microseconds of each collective, in order.
        compute_us: the compute beside which it and those before it can run.
    """
    waited = np.maximum.accumulate(np.maximum(np.cumsum(times_us) - compute_us, 0.0))
    return np.diff(waited, prepend=0.0)


def sequential_waits(times_us: np.ndarray, before_us: np.ndarray, until_us: np.ndarray) -> np.ndarray:
    """Return how long each use waits for its gather.

    A gather begins after the gather before it and after the second to last use before its own.

    Args:
        times_us: microseconds of each gather, in the order of the uses.
        before_us: the compute before each use.
        until_us: the compute until each use has ended.

    Example:
        Gathers of 4 us and uses of 5 us: the first use waits for its gather, and every later gather runs beside the
        use before its own.

        >>> sequential_waits(np.full(4, 4.0), np.arange(4) * 5.0, np.arange(1, 5) * 5.0).tolist()
        [4.0, 0.0, 0.0, 0.0]
    """
    waits, waited, ended = np.zeros(len(times_us)), 0.0, 0.0
    ends: list[float] = []  # of the uses, by the clock
    for n, time in enumerate(times_us.tolist()):
        ended = max(ended, ends[n - 2] if n > 1 else 0.0) + time
        waits[n] = max(ended - (before_us[n] + waited), 0.0)
        waited += waits[n]
        ends.append(until_us[n] + waited)
    return waits


def _flat(collectives: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs of collectives in the order of their operators: the collectives' and the operators' numbers."""
    if not collectives:
        return np.zeros(0, int), np.zeros(0, int)
    ops = np.concatenate([ops for _, ops in collectives])
    numbers = np.repeat([n for n, _ in collectives], [len(ops) for _, ops in collectives])
    order = np.argsort(ops, kind="stable")
    return numbers[order], ops[order]
