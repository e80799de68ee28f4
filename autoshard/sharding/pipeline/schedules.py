"""Schedules of a pipeline, as data: the tick in which each stage works on each microbatch.

In each tick, every stage runs at most one forward and one backward part, each for one microbatch. All stages run the
same program. So if one stage runs a part in a tick, the tick takes the time of this part on every stage. A schedule is
a table that gives the tick of each part. All else follows from this table: which ticks run which parts, how long values
wait, and how many slots there are.

    before      what comes before the stack of layers, for one microbatch
    forward     the layers of one stage
    recompute   the layers of one stage again, from the stage's input, where it keeps the input and not the residuals
    middle      from the output of the last layer to its gradient: the head and the loss
    backward    the gradients of one stage's layers
    weights     the gradients of one stage's weights, where `backward` leaves them out
    after       what needs the gradient of the stack's input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard._shown import shown

BEFORE, FORWARD, MIDDLE, BACKWARD, WEIGHTS, AFTER = "before", "forward", "middle", "backward", "weights", "after"
RECOMPUTE = "recompute"
PARTS = (BEFORE, FORWARD, RECOMPUTE, MIDDLE, BACKWARD, WEIGHTS, AFTER)  # the order of the parts within a tick
ON_STAGES = (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)
BESIDE = {BEFORE: FORWARD, AFTER: BACKWARD}
"""Light part -> the part in whose ticks it always runs, even with nothing to do. So there are fewer kinds of ticks."""
IDLE = -1
FORWARD_ONLY = "forward"
"""The word of the schedule of a function without gradients."""


@shown
@dataclass(frozen=True)
class Slots:
    """Where values wait between the part that makes them and the parts that take them.

    Attributes:
        count: number of slots of each stage.
        of: slot of each microbatch at each stage, `[M, N]`.
    """

    count: int
    of: np.ndarray


@shown
@dataclass(frozen=True, eq=False)
class Schedule:
    """A table of ticks.

    Attributes:
        name: its word.
        stages: number of stages, N.
        microbatches: number of microbatches, M.
        ticks: part -> the tick in which each stage runs it for each microbatch, `[M, N]`. Parts that are not on stages
            have one column.
    """

    name: str
    stages: int
    microbatches: int
    ticks: Mapping[str, np.ndarray]

    def __post_init__(self):
        self._check()

    @cached_property
    def length(self) -> int:
        """The number of ticks."""
        return 1 + max(int(of_part.max()) for of_part in self.ticks.values())

    def working(self, part: str) -> np.ndarray:
        """For each tick and stage, the microbatch on which the stage runs a part, or `IDLE`: `[T, N]` or `[T, 1]`."""
        of_part = self.ticks[part]
        found = np.full((self.length, of_part.shape[1]), IDLE, np.int32)
        for microbatch, row in enumerate(of_part):
            found[row, np.arange(len(row))] = microbatch
        return found

    @cached_property
    def phases(self) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """Ranges of consecutive ticks in which the same parts run: (first tick, end, parts)."""
        runs = {part: (self.working(part) != IDLE).any(axis=1) for part in self.ticks}
        parts = [tuple(p for p in PARTS if p in runs and runs[BESIDE.get(p, p)][t]) for t in range(self.length)]
        starts = [t for t in range(self.length) if t == 0 or parts[t] != parts[t - 1]]
        return tuple((a, b, parts[a]) for a, b in zip(starts, [*starts[1:], self.length], strict=True))

    def slots(self, made: str, taken: str | Sequence[str]) -> Slots:
        """The slots of values that one part makes and other parts take. A slot is free after its last read.

        Args:
            made: the part that makes them.
            taken: the parts that take them. If such a part is not on stages, it takes those of all stages at once.
        """
        write = self.ticks[made]
        last = self._last(made, taken)
        of = np.zeros(write.shape, np.int32)
        count = 1
        for stage in range(write.shape[1]):
            free_after: list[int] = []  # for each slot, the last tick that reads it
            for microbatch in np.argsort(write[:, stage]):
                start, end = int(write[microbatch, stage]), int(last[microbatch, stage])
                slot = next((n for n, tick in enumerate(free_after) if tick < start), len(free_after))
                if slot == len(free_after):
                    free_after.append(end)
                free_after[slot] = end
                of[microbatch, stage] = slot
            count = max(count, len(free_after))
        return Slots(count, of)

    def slot_table(self, slots: Slots, made: str, part: str) -> np.ndarray:
        """For each tick in which a part runs, the slots of its microbatch, `[T, N]`; `IDLE` where a stage is idle.

        Args:
            slots: the slots.
            made: the part that makes the values.
            part: the part that writes or reads them.
        """
        found = np.full((self.length, slots.of.shape[1]), IDLE, np.int32)
        for microbatch, row in enumerate(np.broadcast_to(self.ticks[part], self.ticks[made].shape)):
            found[row, np.arange(len(row))] = slots.of[microbatch]
        return found

    def live(self, made: str, taken: str | Sequence[str]) -> np.ndarray:
        """The number of microbatches whose values wait at each stage in each tick, `[T, N]`; see `slots`."""
        write = self.ticks[made]
        last = self._last(made, taken)
        ticks = np.arange(self.length)[:, None, None]
        return ((write <= ticks) & (ticks <= last)).sum(axis=1)

    def _last(self, made: str, taken: str | Sequence[str]) -> np.ndarray:
        """The tick of the last part that takes the values of each microbatch at each stage, `[M, N]`."""
        shape, parts = self.ticks[made].shape, [taken] if isinstance(taken, str) else taken
        return np.max([np.broadcast_to(self.ticks[p], shape) for p in parts], axis=0)

    @property
    def kept(self) -> tuple[str, tuple[str, ...]]:
        """What a stage keeps of a microbatch for its gradients, "inputs" or "residuals", and the parts that take it."""
        if RECOMPUTE in self.ticks:
            return "inputs", (RECOMPUTE,)
        return "residuals", tuple(part for part in (BACKWARD, WEIGHTS) if part in self.ticks)

    def ideal(self, costs: Mapping[str, float]) -> tuple[float, float]:
        """The time of all ticks, and the time in which each stage works, in the unit of `costs` (part -> its time)."""
        total = sum((end - start) * sum(costs.get(p, 0.0) for p in parts) for start, end, parts in self.phases)
        return total, self.microbatches * sum(costs.get(part, 0.0) for part in self.ticks)

    def _check(self) -> None:
        """Assert that values move to the next stage in one tick, and that a stage runs a part once in each tick."""
        ticks = self.ticks
        forward, last = ticks[FORWARD], self.stages - 1
        assert (np.diff(forward, axis=1) == 1).all(), "forward moves one stage in each tick"
        assert (ticks[BEFORE][:, 0] == forward[:, 0]).all()
        assert (ticks[MIDDLE][:, 0] >= forward[:, last]).all()
        if BACKWARD in ticks:
            backward = ticks[BACKWARD]
            assert (np.diff(backward, axis=1) == -1).all(), "backward moves one stage in each tick"
            assert (ticks[MIDDLE][:, 0] == backward[:, last]).all()
            assert (ticks[AFTER][:, 0] == backward[:, 0]).all()
            assert (ticks.get(WEIGHTS, backward) >= backward).all()
        if RECOMPUTE in ticks:
            assert WEIGHTS not in ticks, "recomputed residuals do not wait for the gradients of weights"
            assert (ticks[RECOMPUTE] == ticks[BACKWARD]).all(), "recomputed residuals do not wait"
        for part, of_part in ticks.items():
            for stage in range(of_part.shape[1]):
                assert len({*of_part[:, stage].tolist()}) == self.microbatches, f"{part} runs twice in one tick"


def _schedule(
    name: str,
    stages: int,
    microbatches: int,
    first_backward: int,
    weights: int | None = None,
    keeps_inputs: bool = False,
) -> Schedule:
    """A schedule in which microbatch m enters the first stage in tick m.

    Args:
        name: its word.
        stages: number of stages.
        microbatches: number of microbatches.
        first_backward: the tick in which the last stage runs its first backward part.
        weights: the tick in which all stages compute their first gradients of weights; None if backward includes them.
        keeps_inputs: whether a stage keeps the input of a microbatch, and computes the residuals again from it.
    """
    m, s = np.arange(microbatches)[:, None], np.arange(stages)[None, :]
    backward = first_backward + m + (stages - 1 - s)
    ticks = {BEFORE: m, FORWARD: m + s, MIDDLE: first_backward + m, BACKWARD: backward, AFTER: backward[:, :1]}
    if weights is not None:
        ticks[WEIGHTS] = np.broadcast_to(weights + m, (microbatches, stages))
    if keeps_inputs:
        ticks[RECOMPUTE] = backward
    return Schedule(name, stages, microbatches, ticks)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward parts, then all backward parts. Each stage holds the residuals of all microbatches."""
    return _schedule("gpipe", stages, microbatches, microbatches + stages - 1)


def forward_then_backward(stages: int, microbatches: int) -> Schedule:
    """As `gpipe`, but a stage keeps its input for each microbatch, and computes its layers again before the gradients.

    Each backward part is the last one that takes an input, and frees it.
    """
    return _schedule("ftb", stages, microbatches, microbatches + stages - 1, keeps_inputs=True)


def one_forward_one_backward_of_inputs(stages: int, microbatches: int) -> Schedule:
    """As `1f1b`, but a stage keeps its inputs as in `ftb`, of at most 2 N - 1 microbatches."""
    return _schedule("1f1b-inputs", stages, microbatches, stages - 1, keeps_inputs=True)


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """The last stage runs each backward part right after its forward part. A stage holds at most 2 N - 1 residuals."""
    return _schedule("1f1b", stages, microbatches, stages - 1)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """As `1f1b`, but gradients of weights are computed in ticks in which all stages have some to compute."""
    return _schedule("zb", stages, microbatches, stages - 1, 2 * (stages - 1))


def forward_only(stages: int, microbatches: int) -> Schedule:
    """The forward parts alone, for a function without gradients. Nothing waits."""
    m, s = np.arange(microbatches)[:, None], np.arange(stages)[None, :]
    ticks = {BEFORE: m, FORWARD: m + s, MIDDLE: m + stages - 1}
    return Schedule(FORWARD_ONLY, stages, microbatches, ticks)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "zb": zero_bubble, "ftb": forward_then_backward,
    "1f1b-inputs": one_forward_one_backward_of_inputs,
}  # fmt: skip
"""The words of `schedule=`, for functions with gradients."""
LEAN = ("1f1b-inputs", "ftb")
"""The words to try if nothing fits the memory: these hold least, but compute more."""
WITH_RESIDUALS = {"ftb": "gpipe", "1f1b-inputs": "1f1b"}
"""Word of a schedule whose stages keep inputs -> the one with the same order whose stages keep residuals."""
