"""Time and memory of parameters that are gathered one layer early, as `gather="prefetch"` asks.

In scans (`lower.gathers.prefetched_scan`), a layer is one iteration. In written-out layers
(`lower.gathers.prefetched_layers`), it is the operators between two uses of the same kind of parameters
(`layout.unrolled_layers`).

A gather is early if the products of its own layer do not hide it, as for the operators that run first. To gather the
others early would take memory for a second layer and a copy into the carry of a loop, and save nothing. Only products
count, because XLA:TPU runs gathers beside products only: with four layers of Llama-7B, compiled for v5e:2x4, the first
gather of each loop body runs alone, although the norm before it takes half of its time. Where the compiler runs no
gather beside compute (`machines.options.asynchronous`), none is early. In straight code, a gather that the forward and
the backward pass share is not early either, because it would then run twice.

The early gathers of one iteration run beside all compute of the iteration before it. Each time a loop starts, its first
gathers are exposed. Its last iteration gathers parameters that nothing uses. The loop holds the gathered parameters of
two iterations. A compiler cannot write the next ones over those in use, so it copies them:

    copy_us = 2 x gathered bytes / bandwidth in every iteration
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import Collective, LiveBuffers, StepCost, step_cost
from autoshard.sharding.cost.overlap import Overlap, waits_of
from autoshard.sharding.cost.stretches import StretchTimes
from autoshard.sharding.layout.loop_gathers import loop_operands
from autoshard.sharding.layout.unrolled_layers import stages_of
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED
from autoshard.sharding.machines.options.asynchronous import gathers_beside_compute
from autoshard.sharding.machines.targets import Target
from autoshard.spmdrules.ir.program import Op, walk

EarlyValue = tuple[int, int]  # number of a scan, or -1 - number of a stage; value


@shown
@dataclass(frozen=True)
class Loop:
    """A scan, or a written-out layer.

    Attributes:
        number: for a scan, its number in `Program.ops`; for a layer, -1 - its number among the stages.
        first: the number of the operator from which its early gathers are held: the scan itself, or the first operator
            of the stage before.
        begin: the number of its first operator.
        last: the number of its last operator.
        starts: how often it starts in a step.
    """

    number: int
    first: int
    begin: int
    last: int
    starts: float


@shown
@dataclass(frozen=True, eq=False)
class Gathered:
    """The buffers of a gathered operand.

    Attributes:
        buffers: the buffers; their ranges are those of the operators that use them.
        ops: for each buffer, the number of the first operator that uses it.
        array: which operand of these operators it is.
        collective: the number of the collective.
    """

    buffers: LiveBuffers
    ops: np.ndarray
    array: int
    collective: int


class EarlyGathers:
    """The operands that can be gathered one layer early.

    Args:
        axes: the logical axes of the program.
        roles: their roles.
        target: the machine.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles, target: Target):
        self._ops: list[Op] = list(axes.program.ops())
        self._loops: dict[int, Loop] = {}  # value -> the scan that can gather it early
        self._aliases, self.target = axes.parameter_aliases, target
        self._none = target.platform == "tpu" and not gathers_beside_compute(
            target.name.partition(":")[0], target.devices, target.chip.options
        )
        number_of = {id(op): number for number, op in enumerate(self._ops)}
        for number, op in enumerate(self._ops):
            if op.name == "scan":
                last = number + sum(1 for _ in walk(op.blocks[0]))
                chains = loop_operands(axes, roles, op).chains
                self._loops.update(dict.fromkeys(chains, Loop(number, number, number, last, op.trips)))
        self._layers: list[Loop] = []
        before = 0
        for number, stage in enumerate(stages_of(axes, roles)):
            begin, end = number_of[id(stage.sites[0].op)], stage.sites[-1].op
            last = number_of[id(end)] + sum(1 for block in end.blocks for _ in walk(block))
            if stage.is_layer and number:  # nothing computes before the first one
                self._layers.append(Loop(-1 - number, before, begin, last, 0.0))
            before = begin

    def __call__(
        self,
        cost: StepCost,
        gathered: Sequence[Gathered],
        others: Sequence[LiveBuffers],
        times: StretchTimes,
        products: StretchTimes,
    ) -> StepCost:
        """Return the cost of a step that gathers early what its products do not hide.

        Args:
            cost: the cost of a step that gathers nothing early.
            gathered: its gathered operands.
            others: the other buffers.
            times: the compute time of each stretch.
            products: the time of products alone.
        """
        values = frozenset() if self._none else self._in_scans(cost, gathered, products)
        layers = frozenset() if self._none else self._in_layers(cost, gathered, products)
        arrays = {each.collective: each.array for each in gathered}
        early = frozenset(value for _, value in values)
        moved = [self._moved(c, arrays[n], early) if n in arrays else c for n, c in enumerate(cost.collectives)]
        compute, copies, chip = cost.kernels_us, defaultdict[int, float](float), self.target.chip
        for each in gathered:
            for op in (op for op in each.ops.tolist() if self._ops[op].operands[each.array] in early):
                time = 2 * each.buffers.nbytes / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
                compute += time * self._ops[op].trips
                copies[int(times.stretches.number[op])] += time
        held = [some for each in gathered for some in self._held(each, early, layers)]
        new = step_cost(compute, moved, chip, cost.host, times, copies_us=copies)
        return replace(new, live_buffers=(*others, *held), early=values | layers)

    def _in_scans(self, cost: StepCost, gathered: Sequence[Gathered], products: StretchTimes) -> frozenset[EarlyValue]:
        """Return what scans gather early, as (number of the scan, value)."""
        waiting = None  # None: compute hides nothing, so every operator waits for its gathers
        if cost.overlap is not None:
            overlap = Overlap([c.place for c in cost.collectives], products)
            waiting = overlap.waiting([c.once_us for c in cost.collectives])
        found: set[EarlyValue] = set()
        for each in gathered:
            for op in each.ops.tolist():
                value = self._ops[op].operands[each.array]
                if value in self._loops and (waiting is None or (each.collective, op) in waiting):
                    found.add((self._loops[value].number, self._source(value)))
        return frozenset((loop.number, v) for v, loop in self._loops.items() if (loop.number, self._source(v)) in found)

    def _in_layers(self, cost: StepCost, gathered: Sequence[Gathered], products: StretchTimes) -> frozenset[EarlyValue]:
        """Return what written-out layers gather early, as (-1 - number of the stage, value)."""
        found: set[EarlyValue] = set()
        for layer in self._layers:
            uses: list[tuple[int, float, int]] = []  # operator, time of the gather, value
            for each in gathered:
                once = cost.collectives[each.collective].once_us
                own = (layer.begin <= each.buffers.first) & (each.buffers.last <= layer.last)
                values = [self._ops[op].operands[each.array] for op in each.ops[own].tolist()]
                uses += [(op, once, v) for op, v in zip(each.buffers.first[own].tolist(), values, strict=True)]
            if not uses:
                continue
            uses.sort()
            ops = np.array([op for op, *_ in uses])
            before = products.before_us(0, ops) - products.before_us(0, np.array([layer.begin]))
            waits = waits_of(np.array([once for _, once, _ in uses]), before)
            every = cost.overlap is None
            found |= {(layer.number, v) for (*_, v), wait in zip(uses, waits.tolist(), strict=True) if wait or every}
        return frozenset(found)

    def _source(self, value: int) -> int:
        return self._aliases[value] if value in self._aliases else value

    def _moved(self, each: Collective, array: int, values: frozenset[int]) -> Collective:
        """Return a gather that runs one iteration early where its operand is one of these values."""
        if each.place is None or not each.count:
            return each
        operands = [self._ops[op].operands[array] for op in each.place.ops.tolist()]
        starts = np.array([self._loops[v].starts if v in values else 0.0 for v in operands])
        count = each.count + float(starts.sum())
        place = replace(each.place, starts=starts)
        return replace(each, count=count, time_us=each.once_us * count, exposed_us=each.once_us * count, place=place)

    def _held(self, each: Gathered, values: frozenset[int], layers: frozenset[EarlyValue]) -> list[LiveBuffers]:
        """Return the buffers of a gathered operand; those of a scan are held for all of it, twice (two iterations)."""
        operands = [self._ops[op].operands[each.array] for op in each.ops.tolist()]
        first = each.buffers.first
        if layers:
            begins = np.array([layer.begin for layer in self._layers])
            number = (np.searchsorted(begins, first, side="right") - 1).tolist()
            around = [self._layers[n] if n >= 0 else None for n in number]
            first = np.array([
                layer.first if layer is not None and (layer.number, v) in layers else begin
                for layer, v, begin in zip(around, operands, first.tolist(), strict=True)
            ], int)  # fmt: skip
        late = np.array([v not in values for v in operands], bool)
        loops = [self._loops[v] for v in operands if v in values]
        found = [replace(each.buffers, first=first[late], last=each.buffers.last[late])] if late.any() else []
        if loops:
            begin, end = np.array([loop.first for loop in loops]), np.array([loop.last for loop in loops])
            found.append(LiveBuffers(2 * each.buffers.nbytes, begin, end))
        return found
