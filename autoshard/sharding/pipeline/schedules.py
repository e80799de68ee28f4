"""Schedules of a pipeline, as data: the tick in which each stage works on each microbatch.

In each tick, every stage runs at most one forward and one backward part, each for one microbatch. All stages run the
same program. So if one stage runs a part in a tick, the tick takes the time of this part on every stage. A schedule is
a table that gives the tick of each part. All else follows from this table: which ticks run which parts, how long values
wait, and how many slots there are.

A stage may hold several chunks of consecutive layers. A microbatch then passes through all stages once for each chunk,
and a stage works on an item: one chunk of its layers for one microbatch.

    before      what comes before the stack of layers, for one microbatch
    forward     the layers of one stage, or one chunk of them
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
from autoshard.sharding.layout.unrolled_layers import repeats

BEFORE, FORWARD, MIDDLE, BACKWARD, WEIGHTS, AFTER = "before", "forward", "middle", "backward", "weights", "after"
RECOMPUTE = "recompute"
PARTS = (BEFORE, FORWARD, RECOMPUTE, MIDDLE, BACKWARD, WEIGHTS, AFTER)  # the order of the parts within a tick
ON_STAGES = (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)
LIGHT = (BEFORE, AFTER)
"""Parts that take little time. They may run in more ticks than they have work in. So there are fewer kinds of ticks."""
IDLE = -1
FORWARD_ONLY = "forward"
"""The word of the schedule of a function without gradients; `forward:V` with V chunks of layers on each stage."""


@shown
@dataclass(frozen=True)
class Slots:
    """Where values wait between the part that makes them and the parts that take them.

    Attributes:
        count: number of slots of each stage.
        of: slot of each item at each stage, `[M V, N]`.
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
        ticks: part -> the tick in which each stage runs it for each item, `[M V, N]`. Item m V + v is chunk v for
            microbatch m. Parts that are not on stages run once for each microbatch, `[M, 1]`.
        chunks: number of chunks of layers of each stage, V.
    """

    name: str
    stages: int
    microbatches: int
    ticks: Mapping[str, np.ndarray]
    chunks: int = 1

    def __post_init__(self):
        self._check()

    @cached_property
    def length(self) -> int:
        """The number of ticks."""
        return 1 + max(int(of_part.max()) for of_part in self.ticks.values())

    def lead(self, part: str) -> int:
        """The ticks from `before` to the forward part that takes its values, or from a backward part to `after`."""
        if part not in self.ticks:
            return 0
        if part == BEFORE:
            return int(self.ticks[FORWARD][0, 0] - self.ticks[BEFORE][0, 0])
        return int(self.ticks[AFTER][0, 0] - self.ticks[BACKWARD][0, 0])

    def items(self, part: str) -> np.ndarray:
        """For each tick and stage, the item on which the stage runs a part, or `IDLE`: `[T, N]` or `[T, 1]`.

        For a part that is not on stages, it is the microbatch.
        """
        of_part = self.ticks[part]
        found = np.full((self.length, of_part.shape[1]), IDLE, np.int32)
        for item, row in enumerate(of_part):
            found[row, np.arange(len(row))] = item
        return found

    def working(self, part: str) -> np.ndarray:
        """For each tick and stage, the microbatch on which the stage runs a part, or `IDLE`: `[T, N]` or `[T, 1]`."""
        found = self.items(part)
        return np.where(found == IDLE, IDLE, found // self.chunks).astype(np.int32) if part in ON_STAGES else found

    def working_chunks(self, part: str) -> np.ndarray:
        """For each tick and stage, the chunk whose layers a part on stages runs, or `IDLE`: `[T, N]`."""
        found = self.items(part)
        return np.where(found == IDLE, IDLE, found % self.chunks).astype(np.int32)

    def by_item(self, part: str) -> np.ndarray:
        """The tick in which a part runs for each item: `[M V, N]`, or `[M V, 1]` for parts that are not on stages."""
        return self.ticks[part] if part in ON_STAGES else np.repeat(self.ticks[part], self.chunks, axis=0)

    @cached_property
    def phases(self) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """Ranges of consecutive ticks in which the same parts run: (first tick, end, parts).

        A light part does not begin a range of its own. It runs in all ticks of a range if it has work in one of them.
        """
        runs = {part: (self.items(part) != IDLE).any(axis=1) for part in self.ticks}
        heavy = [tuple(p for p in PARTS if p in runs and p not in LIGHT and runs[p][t]) for t in range(self.length)]
        starts = [t for t in range(self.length) if t == 0 or heavy[t] != heavy[t - 1]]
        found = []
        for a, b in zip(starts, [*starts[1:], self.length], strict=True):
            light = {p for p in LIGHT if p in runs and runs[p][a:b].any()}
            found.append((a, b, tuple(p for p in PARTS if p in heavy[a] or p in light)))
        return tuple(found)

    @cached_property
    def periods(self) -> tuple[tuple[int, tuple[tuple[int, int, tuple[str, ...]], ...]], ...]:
        """Phases that repeat: (how often, the phases of the first period)."""
        keys = [(end - start, parts) for start, end, parts in self.phases]
        return tuple((count, self.phases[first : first + size]) for first, size, count in repeats(keys))

    def slots(self, made: str, taken: str | Sequence[str]) -> Slots:
        """The slots of values that one part makes and other parts take. A slot is free after its last read.

        Args:
            made: the part that makes them.
            taken: the parts that take them. If such a part is not on stages, it takes those of all stages at once.
        """
        write, last = self.by_item(made), self._last(made, taken)
        of = np.zeros(write.shape, np.int32)
        count = 1
        for stage in range(write.shape[1]):
            free_after: list[int] = []  # for each slot, the last tick that reads it
            for item in np.argsort(write[:, stage]):
                start, end = int(write[item, stage]), int(last[item, stage])
                slot = next((n for n, tick in enumerate(free_after) if tick < start), len(free_after))
                if slot == len(free_after):
                    free_after.append(end)
                free_after[slot] = end
                of[item, stage] = slot
            count = max(count, len(free_after))
        return Slots(count, of)

    def slot_table(self, slots: Slots, part: str) -> np.ndarray:
        """For each tick in which a part runs, the slots of its item, `[T, N]`; `IDLE` where a stage is idle.

        A part that is not on stages takes the values of all chunks: `[T, V, N]`, or `[T, N]` for one chunk.

        Args:
            slots: the slots.
            part: the part that writes or reads them.
        """
        of, ticks = slots.of, self.ticks[part]
        if part in ON_STAGES:
            found = np.full((self.length, self.stages), IDLE, np.int32)
            for item, row in enumerate(ticks):
                found[row, np.arange(self.stages)] = of[item]
            return found
        found = np.full((self.length, self.chunks, self.stages), IDLE, np.int32)
        found[ticks[:, 0]] = of.reshape(self.microbatches, self.chunks, self.stages)
        return found[:, 0] if self.chunks == 1 else found

    def write_table(self, slots: Slots, made: str, taken: str | Sequence[str]) -> np.ndarray:
        """For each tick, the slot that each stage writes, `[T, N]`.

        An idle stage writes one in which nothing waits, so that every stage always writes. The number is `IDLE` if
        values wait in all slots.

        Args:
            slots: the slots.
            made: the part that writes them. It is on stages.
            taken: the parts that read them.
        """
        found, write, last = self.slot_table(slots, made), self.by_item(made), self._last(made, taken)
        for tick, stage in np.argwhere(found == IDLE):
            waits = slots.of[(write[:, stage] < tick) & (tick <= last[:, stage]), stage]
            found[tick, stage] = next((n for n in range(slots.count) if n not in waits), IDLE)
        return found

    def live(self, made: str, taken: str | Sequence[str]) -> np.ndarray:
        """The number of items whose values wait at each stage in each tick, `[T, N]`; see `slots`."""
        write, last = self.by_item(made), self._last(made, taken)
        ticks = np.arange(self.length)[:, None, None]
        return ((write <= ticks) & (ticks <= last)).sum(axis=1)

    def _last(self, made: str, taken: str | Sequence[str]) -> np.ndarray:
        """The tick of the last part that takes the values of each item at each stage, `[M V, N]`."""
        shape, parts = self.by_item(made).shape, [taken] if isinstance(taken, str) else taken
        return np.max([np.broadcast_to(self.by_item(p), shape) for p in parts], axis=0)

    @property
    def kept(self) -> tuple[str, tuple[str, ...]]:
        """What a stage keeps of a microbatch for its gradients, "inputs" or "residuals", and the parts that take it."""
        if RECOMPUTE in self.ticks:
            return "inputs", (RECOMPUTE,)
        return "residuals", tuple(part for part in (BACKWARD, WEIGHTS) if part in self.ticks)

    def ideal(self, costs: Mapping[str, float]) -> tuple[float, float]:
        """Return the time of all ticks, and the working time of one stage. Both have the unit of `costs`.

        Args:
            costs: part -> its time for one microbatch, for all chunks of a stage.
        """
        of_tick = {part: cost / (self.chunks if part in ON_STAGES else 1) for part, cost in costs.items()}
        total = sum((end - start) * sum(of_tick.get(p, 0.0) for p in parts) for start, end, parts in self.phases)
        return total, self.microbatches * sum(costs.get(part, 0.0) for part in self.ticks)

    def _check(self) -> None:
        """Assert that values move to the next stage in one tick, and that a stage runs a part once in each tick."""
        ticks, chunks = self.ticks, self.chunks
        forward, last = ticks[FORWARD], self.stages - 1
        assert (np.diff(forward, axis=1) == 1).all(), "forward moves one stage in each tick"
        enters, leaves = (forward[:, stage].reshape(-1, chunks) for stage in (0, last))
        assert (enters[:, 1:] == leaves[:, :-1] + 1).all(), "the next chunk follows in the next tick"
        assert ((enters[:, 0] - ticks[BEFORE][:, 0]) == self.lead(BEFORE)).all() and self.lead(BEFORE) in (0, 1)
        assert (ticks[MIDDLE][:, 0] >= leaves[:, -1]).all()
        if BACKWARD in ticks:
            backward = ticks[BACKWARD]
            assert (np.diff(backward, axis=1) == -1).all(), "backward moves one stage in each tick"
            enters, leaves = (backward[:, stage].reshape(-1, chunks) for stage in (last, 0))
            assert (enters[:, :-1] == leaves[:, 1:] + 1).all(), "the chunk before follows in the next tick"
            assert (ticks[MIDDLE][:, 0] == enters[:, -1]).all()
            assert ((ticks[AFTER][:, 0] - leaves[:, 0]) == self.lead(AFTER)).all() and self.lead(AFTER) in (0, 1)
            assert (ticks.get(WEIGHTS, backward) >= backward).all()
        if RECOMPUTE in ticks:
            assert WEIGHTS not in ticks, "recomputed residuals do not wait for the gradients of weights"
            assert (ticks[RECOMPUTE] == ticks[BACKWARD]).all(), "recomputed residuals do not wait"
        for part, of_part in ticks.items():
            for stage in range(of_part.shape[1]):
                assert len({*of_part[:, stage].tolist()}) == len(of_part), f"{part} runs twice in one tick"


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


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """As `1f1b`, with several chunks of layers a stage. Stage s has the chunks s, N + s, 2 N + s, and so on.

    N microbatches follow each other through chunk 0 of each stage, then through chunk 1, and so on. Then the next N
    follow. The gradients run through the chunks in the opposite order. A tick takes the time of one chunk, so the N - 1
    ticks in which a stage waits for its first value take 1 / V of the time that they take in `1f1b`.

    What comes before the layers runs one tick early, and what comes after them one tick late. So they run in the same
    ticks as the head: N of N V ticks.

    Args:
        stages: number of stages, N.
        microbatches: number of microbatches. If N does not divide it, stages are idle between the chunks of the last.
        chunks: number of chunks of each stage, V.
    """
    n, v = stages, chunks
    m, chunk, s = np.arange(microbatches)[:, None, None], np.arange(v)[None, :, None], np.arange(n)[None, None, :]
    enters = 1 + m // n * n * v + m % n  # the tick in which a microbatch enters the first stage
    forward = (enters + chunk * n + s).reshape(-1, n)
    middle = (enters + n * v - 1).reshape(-1, 1)
    backward = (enters + n * v - 1 + (v - 1 - chunk) * n + (n - 1 - s)).reshape(-1, n)
    ticks = {BEFORE: enters.reshape(-1, 1) - 1, FORWARD: forward, MIDDLE: middle, BACKWARD: backward,
             AFTER: backward[::v, :1] + 1}  # fmt: skip
    return Schedule(f"{INTERLEAVED}:{v}", n, microbatches, ticks, v)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward parts of a schedule, for a function without gradients. The head runs as soon as it can."""
    chunks, forward = schedule.chunks, schedule.ticks[FORWARD]
    ticks = {BEFORE: schedule.ticks[BEFORE], FORWARD: forward, MIDDLE: forward[chunks - 1 :: chunks, -1:]}
    name = FORWARD_ONLY if chunks == 1 else f"{FORWARD_ONLY}:{chunks}"
    return Schedule(name, schedule.stages, schedule.microbatches, ticks, chunks)


INTERLEAVED = "interleaved"
SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "zb": zero_bubble, "ftb": forward_then_backward,
    "1f1b-inputs": one_forward_one_backward_of_inputs,
}  # fmt: skip
"""The words of `schedule=`, besides `interleaved:V`, for functions with gradients."""
LEAN = ("1f1b-inputs", "ftb")
"""The words to try if nothing fits the memory: these hold least, but compute more."""
WITH_RESIDUALS = {"ftb": "gpipe", "1f1b-inputs": "1f1b"}
"""Word of a schedule whose stages keep inputs -> the one with the same order whose stages keep residuals."""
