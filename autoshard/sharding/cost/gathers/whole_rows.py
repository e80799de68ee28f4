"""The memory of gathered rows, such as the nodes of a graph that its edges refer to.

XLA propagates the sharding that a gather needs back to an elementwise operator that computes its operand. So it gathers
the operands of that operator, and computes the whole result. Rows that no such operator computes are gathered once for
both passes. In both cases XLA keeps the whole rows until their last use, which may be in the backward pass. It does not
help to constrain the rows to their own sharding (`pinned_operands`): the peak of the program below was then 1.47 GiB.

Compiled for v5e:4x4 (libtpu 0.0.42.1), `dp:2 fsdp:8 dp-nodes`, a graph network of eight layers and 65536 nodes holds
320 MiB of whole nodes at its peak of 1.19 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.ir.program import Program


@shown
class Rows(NamedTuple):
    """An operand of a gather.

    Attributes:
        value: its number.
        nbytes: its bytes before sharding.
        first: the number of the operator that computes it.
        last: the number of the last one that takes it.
    """

    value: int
    nbytes: int
    first: int
    last: int


def rows_of_gathers(program: Program, roles: Roles, is_written: Callable[[int], bool]) -> dict[int, Rows]:
    """Return the operands of gathers that the program computes: number of the gather -> its operand.

    Args:
        program: the program.
        roles: its roles. Without `other_rows`, there are none.
        is_written: whether a value has a buffer.
    """
    ops = [*program.ops()] if roles.other_rows else []
    maker = {v: number for number, op in enumerate(ops) for v in op.results if not op.blocks}
    last = {v: number for number, op in enumerate(ops) for v in op.operands}
    found = {}
    for number, op in enumerate(ops):
        if op.name == "gather" and (v := op.operands[0]) in maker and is_written(v):
            found[number] = Rows(v, nbytes(program.avals[v]), maker[v], last[v])
    return found


def kept_whole(buffers: Sequence[LiveBuffers], rows: Mapping[int, Rows]) -> list[LiveBuffers]:
    """Return the buffers of a layout. Gathered rows are held from the operator that computes them to their last use.

    Args:
        buffers: the buffers.
        rows: see `rows_of_gathers`.
    """
    found, held = [], set[Rows]()
    for some in buffers:
        whole = [rows.get(number) for number in some.first.tolist()] if rows else []
        is_whole = np.array([each is not None and abs(each.nbytes - some.nbytes) < 1 for each in whole], bool)
        if is_whole.any():
            held |= {each for each, is_one in zip(whole, is_whole, strict=True) if each is not None and is_one}
            some = LiveBuffers(some.nbytes, some.first[~is_whole], some.last[~is_whole])
        found.append(some)
    return found + [LiveBuffers(each.nbytes, np.array([each.first]), np.array([each.last])) for each in held]
