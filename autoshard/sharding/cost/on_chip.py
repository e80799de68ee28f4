"""Which values stay in on-chip memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from autoshard._shown import shown


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
