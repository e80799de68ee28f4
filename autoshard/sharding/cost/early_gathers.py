"""Time and memory of parameters that scans gather one iteration early (`lower.prefetched_scan`).

Early are the gathers that the products of their own iteration do not hide: those of the operators that run first. All
others would take memory for a second iteration, and a copy into the carry of the loop, to no use. Only products count,
because XLA:TPU runs gathers beside products: with four layers of Llama-7B, compiled for v5e:2x4, the first gather of
each loop body runs alone, although the norm before it takes half of its time.

The early gathers of one iteration run beside all compute of the iteration before it. Each time a loop starts, the first
ones have nothing beside which they can run, and the last iteration gathers once more than is needed. The loop holds the
gathered parameters of two iterations. A compiler cannot write the next ones over those in use, so it copies them:

    copy_us = 2 x gathered bytes / bandwidth in every iteration
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import Collective, LiveBuffers, StepCost
from autoshard.sharding.cost.overlap import Overlap
from autoshard.sharding.cost.stretches import StretchTimes
from autoshard.sharding.layout.loop_gathers import loop_operands
from autoshard.spmdrules.ir.program import Op, walk


@shown
@dataclass(frozen=True)
class Loop:
    """A scan.

    Attributes:
        first: its number, counted as in `Program.ops`.
        last: the number of the last operator in its body.
        starts: how often it starts in a step.
    """

    first: int
    last: int
    starts: float


class EarlyGathers:
    """The operands that scans can gather one iteration early.

    Args:
        axes: the logical axes of the program.
        roles: their roles.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles):
        self._ops: list[Op] = list(axes.program.ops())
        self._loops: dict[int, Loop] = {}
        self._aliases = axes.parameter_aliases
        for number, op in enumerate(self._ops):
            if op.name == "scan":
                last = number + sum(1 for _ in walk(op.blocks[0]))
                chains = loop_operands(axes, roles, op).chains
                self._loops.update(dict.fromkeys(chains, Loop(number, last, op.trips)))

    def chosen(self, cost: StepCost, arrays: Sequence[int], products: StretchTimes) -> frozenset[int]:
        """Return the values that scans gather early: those for whose gathers their operators would wait otherwise.

        Args:
            cost: the cost of a step in which no scan gathers early.
            arrays: for each of its collectives, the operand that it gathers; -1 for other collectives.
            products: the time of the products of each stretch.
        """
        found: set[tuple[Loop, int]] = set()
        waiting = None
        if cost.overlap is not None:
            waiting = Overlap([c.place for c in cost.collectives], products).waiting(
                [c.once_us for c in cost.collectives]
            )
        for n, (each, array) in enumerate(zip(cost.collectives, arrays, strict=True)):
            if each.place is None or array < 0 or not each.count:
                continue
            for op in each.place.ops.tolist():
                value = self._ops[op].operands[array]
                if value in self._loops and (waiting is None or (n, op) in waiting):
                    found.add((self._loops[value], self._aliases.get(value, value)))
        return frozenset(v for v, loop in self._loops.items() if (loop, self._aliases.get(v, v)) in found)

    def early(self, each: Collective, array: int, values: frozenset[int]) -> Collective:
        """Return a collective that runs one iteration early where it gathers one of these values.

        Args:
            each: the collective.
            array: which operand it gathers; -1 if it gathers none.
            values: the values.
        """
        if each.place is None or array < 0 or not each.count:
            return each
        operands = [self._ops[op].operands[array] for op in each.place.ops.tolist()]
        starts = np.array([self._loops[v].starts if v in values else 0.0 for v in operands])
        count = each.count + float(starts.sum())
        place = replace(each.place, starts=starts)
        return replace(each, count=count, time_us=each.once_us * count, exposed_us=each.once_us * count, place=place)

    def held(self, buffers: LiveBuffers, ops: np.ndarray, array: int, values: frozenset[int]) -> list[LiveBuffers]:
        """Return the buffers of a gathered operand: for a whole loop, and for two iterations, where it gathers early.

        Args:
            buffers: the buffers; their ranges are those of the operators that use them.
            ops: for each buffer, the number of an operator that uses it.
            array: which operand of these operators.
            values: the values that are gathered early.
        """
        operands = [self._ops[op].operands[array] for op in ops.tolist()]
        early = np.array([v in values for v in operands], bool)
        if not early.any():
            return [buffers]
        loops = [self._loops[v] for v in operands if v in values]
        late = replace(buffers, first=buffers.first[~early], last=buffers.last[~early])
        first, last = np.array([loop.first for loop in loops]), np.array([loop.last for loop in loops])
        return [late, LiveBuffers(2 * buffers.nbytes, first, last)]

    def copied_bytes(
        self, buffers: LiveBuffers, ops: np.ndarray, array: int, values: frozenset[int]
    ) -> dict[int, float]:
        """Return operator -> bytes that each of its runs copies into the carry of its loop; arguments as for `held`."""
        early = [op for op in ops.tolist() if self._ops[op].operands[array] in values]
        return dict.fromkeys(early, buffers.nbytes)
