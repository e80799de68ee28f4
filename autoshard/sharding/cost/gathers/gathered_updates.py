"""The memory of parameters that each step gathers after it has updated their shards (ZeRO-1 and ZeRO-2).

XLA:TPU does not gather a new parameter straight into the donated buffer of the old one. It gathers it into another
buffer, and copies this buffer at the end of the program. So each new parameter is held from its update to the end.

Compiled for v5e:4x4 (libtpu 0.0.42.1), `zero1:16`: with 64 rows, a scanned ViT-L/16 holds 1.17 GiB of new parameters at
the end of its step, and its parameters have 1.13 GiB. A mixture of experts with three layers in a row holds 1.52 GiB,
and its parameters have 1.67 GiB. Two changes of the program did not help: to make the new parameter depend on all uses
of the old one, and to give both the same layout in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import AFTER_UPDATE, state_gathers
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.core.placement import axes_of
from autoshard.spmdrules.ir.program import Program


def updates(program: Program, state: Mapping[int, int]) -> dict[int, int]:
    """Return which operator computes the new value of each donated input: input -> number of the operator.

    Args:
        program: the program.
        state: donated input -> the result that is written over it.
    """
    made = {v: number for number, op in enumerate(program.ops()) for v in op.results}
    return {source: made[result] for source, result in state.items() if result in made}


def gathered_updates(layout: Layout, updated: Mapping[int, int], last: int) -> list[LiveBuffers]:
    """Return the buffers of the parameters that are gathered after their update.

    Args:
        layout: the layout.
        updated: see `updates`.
        last: the number of the program's last operator.
    """
    return [
        LiveBuffers(
            nbytes(layout.axes.program.avals[move.value]) / layout.shard_count(axes_of(layout.stored_spec(move.value))),
            np.array([updated[move.value]]),
            np.array([last]),
        )
        for move in state_gathers(layout, updated)
        if move.when == AFTER_UPDATE
    ]
