"""The optimization barriers of a program for TPUs."""

from __future__ import annotations

from typing import Any

from autoshard.sharding.lower.body_lowering import BodyLowering
from autoshard.sharding.lower.tpu.loop_barriers import LoopBarriers
from autoshard.sharding.lower.tpu.update_barriers import UpdateBarriers
from autoshard.spmdrules.ir.program import Op


class Barriers:
    """All barriers of a program.

    Args:
        lowering: what lowers the program.
    """

    def __init__(self, lowering: BodyLowering):
        layout, topology = lowering.layout, lowering.link_prices.topology
        self._all: list[UpdateBarriers | LoopBarriers] = [UpdateBarriers(layout, lowering.tpu is not None)]
        if lowering.tpu is not None and topology is not None and not topology.keeps_reduce_scatters:
            self._all.append(LoopBarriers(layout.axes.program.block, layout.roles))

    def before(self, op: Op, env: dict[Any, Any]) -> None:
        """Add the barriers that come before an operator.

        Args:
            op: the operator that is lowered next.
            env: variable of the jaxpr -> value. Values that wait are replaced by results of a barrier.
        """
        for barriers in self._all:
            barriers.before(op, env)
