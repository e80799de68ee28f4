"""Transposed copies of the stacks of parameters that loops gather on GPUs.

XLA:GPU gathers an array only along the dimension that is the major one in memory. If a loop gathers slices of a stored
stack along another dimension, the layout that this needs is that of the whole stack: the stack is transposed once,
before the first loop that takes slices of it, and the copy is freed after the last one.

Compiled for h100 (jaxlib 0.10.2), the step of a scanned Llama holds `f32[ffn / 8, layers, embed]` beside the stored
`f32[layers, embed, ffn / 8]` through both of its loops. It has no such copy of weights that are stored in shards along
their first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.delays.delayed_gradients import last_operator
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.core.placement import axes_of
from autoshard.spmdrules.ir.program import Program, walk


def stack_uses(program: Program, parameters: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return when loops take slices of stacked parameters.

    Args:
        program: the program.
        parameters: value -> the parameter that it equals, up to slices and casts.

    Returns:
        Parameter -> the number of the first loop that takes its slices, and that of the last operator of the last such
        loop, counted as in `Program.ops`.
    """
    number = {id(op): n for n, op in enumerate(program.ops())}
    found: dict[int, tuple[int, int]] = {}
    for outer in program.block.ops:
        if not outer.blocks or not outer.blocks[-1].ops:
            continue
        taken = {v for block in outer.blocks for op in walk(block) for v in op.operands if v in parameters}
        for source in {parameters[v] for v in taken if program.avals[v].ndim < program.avals[parameters[v]].ndim}:
            first = found[source][0] if source in found else number[id(outer)]
            found[source] = first, number[id(last_operator(outer))]
    return found


def transposed_stacks(layout: Layout, uses: Mapping[int, tuple[int, int]]) -> list[LiveBuffers]:
    """Return the copies that a layout needs.

    Args:
        layout: the layout.
        uses: when loops take slices of each stacked parameter, see `stack_uses`.
    """
    return [
        LiveBuffers(_local_bytes(layout, v), np.array([first]), np.array([last]))
        for v, (first, last) in uses.items()
        if not layout.is_gathered_before_loop(v) and _is_transposed(layout, v)
    ]


def _local_bytes(layout: Layout, value: int) -> float:
    return nbytes(layout.axes.program.avals[value]) / layout.shard_count(axes_of(layout.stored_spec(value)))


def _is_transposed(layout: Layout, stack: int) -> bool:
    """Whether a slice is gathered along a dimension that others precede."""
    stored, used = layout.stored_spec(stack), {*axes_of(layout.spec(stack))}
    gathered = [d for d, axes in enumerate(stored) if d and any(a not in used for a in axes)]
    return bool(gathered) and math.prod(layout.axes.program.avals[stack].shape[1 : gathered[-1]]) > 1
