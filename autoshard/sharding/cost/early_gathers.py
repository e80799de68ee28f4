"""Time and memory of parameters that scans gather one iteration early (`lower.prefetched_scan`).

The gathers of one iteration run beside all compute of the iteration before it. Each time a loop starts, the first
gathers have nothing beside which they can run, and the last iteration gathers once more than is needed. The loop holds
the gathered parameters of two iterations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.layout.loop_gathers import loop_operands
from autoshard.spmdrules.ir.program import Op, walk


class EarlyGathers:
    """The operands that scans gather one iteration early.

    Args:
        axes: the logical axes of the program.
        roles: their roles.
    """

    def __init__(self, axes: LogicalAxes, roles: Roles):
        self._ops: list[Op] = list(axes.program.ops())
        self._loops: dict[int, tuple[int, int, float]] = {}  # value -> first and last operator of its loop, its starts
        for number, op in enumerate(self._ops):
            if op.name == "scan":
                last = number + sum(1 for _ in walk(op.blocks[0]))
                chains = loop_operands(axes, roles, op).chains
                self._loops.update(dict.fromkeys(chains, (number, last, op.trips)))
        self._table = cache(self._new_table)

    def starts(self, ops: np.ndarray, array: int) -> np.ndarray:
        """Return for each operator how often the loop starts that gathers its operand early; 0 where none does.

        Args:
            ops: the numbers of the operators, counted as in `Program.ops`.
            array: which operand.
        """
        return self._table(array)[ops, 2]

    def held(self, buffers: LiveBuffers, ops: np.ndarray, array: int) -> list[LiveBuffers]:
        """Return the buffers of a gathered operand: for a whole loop, and for two iterations, where it gathers early.

        Args:
            buffers: the buffers; their ranges are those of the operators that use them.
            ops: for each buffer, the number of an operator that uses it.
            array: which operand of these operators.
        """
        first, last, starts = self._table(array)[ops].T
        early = starts > 0
        if not early.any():
            return [buffers]
        late = replace(buffers, first=buffers.first[~early], last=buffers.last[~early])
        return [late, LiveBuffers(2 * buffers.nbytes, first[early].astype(int), last[early].astype(int))]

    def _new_table(self, array: int) -> np.ndarray:
        """Return a row for each operator: first and last operator of the loop that gathers this operand, its starts."""
        none = 0, 0, 0.0
        values = [op.operands[array] if array < len(op.operands) else -1 for op in self._ops]
        return np.array([self._loops.get(v, none) for v in values], float).reshape(-1, 3)
