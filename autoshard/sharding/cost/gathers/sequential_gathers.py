"""Memory of parameters that are gathered one after another (`lower.gathers.gather_order`).

A gathered parameter is held from the beginning of the previous use to the end of its own use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.sharding.cost.collectives import LiveBuffers


def gathered_one_ahead(buffers: Sequence[LiveBuffers], stretch_of: np.ndarray) -> list[LiveBuffers]:
    """Return the buffers of gathered parameters with live ranges that begin at the use before their own.

    Args:
        buffers: the buffers; their ranges are the operators that use them.
        stretch_of: for each operator, the number of its stretch. The first use in a stretch has no use before it.
    """
    if not buffers:
        return []
    uses = np.unique(np.concatenate([each.first for each in buffers]))
    uses = uses[np.lexsort((uses, stretch_of[uses]))]
    before = np.concatenate([uses[:1], uses[:-1]])
    before = np.where(stretch_of[before] == stretch_of[uses], before, uses)
    previous = dict(zip(uses.tolist(), before.tolist(), strict=True))
    return [replace(each, first=np.array([previous[use] for use in each.first.tolist()], int)) for each in buffers]
