"""Which values stay in on-chip memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.cost.constants import ON_CHIP_OPS
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.spmdrules.ir.program import Op


@shown
class Life(NamedTuple):
    """A value of a block.

    Attributes:
        first: the number of the operator that makes it, counted in the block.
        last: the number of the operator that reads it last.
        size: its bytes.
    """

    first: int
    last: int
    size: float


def short_lives(ops: Sequence[Op], users: Mapping[int, Sequence[Op]], sizes: Mapping[int, float]) -> dict[int, Life]:
    """Return the lives of the arrays of a block that may stay in on-chip memory.

    They are read within `ON_CHIP_OPS` operators, and not in an inner block. Scalars, and what is moved to host memory
    or back, are left out.

    Args:
        ops: the operators of the block.
        users: value -> the operators that take it.
        sizes: value -> its bytes, for values that are written and that the block does not return.
    """
    when = {id(op): number for number, op in enumerate(ops)}
    transferred = {v for op in ops if is_host_transfer(op) for v in (*op.operands, *op.results)}
    lives: dict[int, Life] = {}
    for op in ops:
        for v, var in zip(op.results, op.eqn.outvars, strict=True):
            if v not in sizes or v in transferred or not getattr(var.aval, "shape", ()):
                continue
            taken, first = users.get(v, ()), when[id(op)]
            last = max([first, *(when[id(u)] for u in taken)])
            if last - first <= ON_CHIP_OPS and not any(u.blocks for u in taken):
                lives[v] = Life(first, last, sizes[v])
    return lives


def on_chip_shares(lives: Mapping[int, Life], operators: int) -> dict[int, float]:
    """Return the share of each value: its fraction of the bytes that are live with it, at their peak.

    Larger values do not count. They may not fit at all, and a byte of on-chip memory saves as many reads for a small
    value as for a large one.

    Args:
        lives: value -> its life.
        operators: number of operators of the block.

    >>> on_chip_shares({0: Life(0, 2, 10.0), 1: Life(1, 3, 30.0), 2: Life(2, 3, 30.0)}, 4)
    {0: 1.0, 1: 0.42857142857142855, 2: 0.42857142857142855}
    """
    shares, live = {}, np.zeros(operators)
    for _, group in itertools.groupby(sorted(lives, key=lambda v: lives[v].size), key=lambda v: lives[v].size):
        alike = [*group]
        for v in alike:
            live[lives[v].first : lives[v].last + 1] += lives[v].size
        for v in alike:
            peak = float(live[lives[v].first : lives[v].last + 1].max())
            shares[v] = lives[v].size / peak if peak else 1.0
    return shares
