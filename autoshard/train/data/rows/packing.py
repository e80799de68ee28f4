"""Packs several documents into each row of a batch. Positions attend to their own document only.

A document of n tokens takes n - 1 positions, because each of its inputs has a target. Each has its own segment, counted
from 1, and positions that start at 0. Unused positions are segment 0 and have mask 0.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from autoshard.train.data.rows.constants import PADDING
from autoshard.train.data.rows.encoding import Document

Row = dict[str, np.ndarray]


def pack(lengths: Sequence[int], space: int) -> list[list[int]]:
    """Assign items to bins by best fit, the longest items first.

    Args:
        lengths: length of each item, at most `space`.
        space: length of a bin.

    Returns:
        The items of each bin.

    >>> pack([3, 9, 6, 1], 10)
    [[1], [2, 0, 3]]
    """
    bins: list[list[int]] = []
    left: dict[int, list[int]] = {}  # free space -> bins that have it
    spaces: list[int] = []  # the keys of `left`, sorted
    for item in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect.bisect_left(spaces, lengths[item])
        if place == len(spaces):
            chosen, free = len(bins), space
            bins.append([])
        else:
            free = spaces[place]
            chosen = left[free].pop()
            if not left[free]:
                del left[free], spaces[place]
        bins[chosen].append(item)
        rest = free - lengths[item]
        if rest not in left:
            left[rest] = []
            bisect.insort(spaces, rest)
        left[rest].append(chosen)
    return bins


def row_of(documents: Sequence[Document], context: int) -> Row:
    """Make a row of documents that fit into it.

    Returns:
        `inputs`, `targets`, `positions` and `segment_ids`, int32 `[context]`, and `mask`, float32 `[context]`.
    """
    row: Row = {name: np.full(context, PADDING, np.int32) for name in ("inputs", "targets", "positions", "segment_ids")}
    row["mask"] = np.zeros(context, np.float32)
    start = 0
    for segment, document in enumerate(documents, 1):
        count = len(document.tokens) - 1
        place = slice(start, start + count)
        row["inputs"][place], row["targets"][place] = document.tokens[:-1], document.tokens[1:]
        row["mask"][place], row["segment_ids"][place] = document.counts[1:], segment
        row["positions"][place] = np.arange(count)
        start += count
    return row
