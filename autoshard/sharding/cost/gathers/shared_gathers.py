"""Gathered operands that several operators share: one gather serves all operators of a loop or of straight code.

Operators may take different arrays of the same value, such as a table and its cast. Each array is then gathered on its
own, and each gathered copy has its own lifetime. An example is a tied embedding: the lookup takes the table in float32,
and the head takes a copy in bfloat16. Compiled for v5e:2x4 and v6e:4x4 (libtpu 0.0.42.1), GPT 1.3B and GPT-3 gather the
table twice: once for the lookup, and once for both products with the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.equivalence_classes import SharedOperands
from autoshard.sharding.layout.operator_strategy import Move


def add_moved(
    buffers: dict[Any, LiveBuffers],
    moved_bytes: dict[Any, float],
    move: Move,
    axes: tuple[str, ...],
    operands: Sequence[SharedOperands],
    narrow: float = 1.0,
    until: np.ndarray | None = None,
) -> np.ndarray:
    """Add the operands that an operator class moves to `buffers`.

    Args:
        buffers: the buffers so far. A key has the kind of the move, its mesh axes and `SharedOperands.number`. If the
            array is not the one that the first operator takes, the key also has its bytes.
        moved_bytes: key -> the bytes on a device of the array that the first operator takes.
        move: the move.
        axes: its mesh axes.
        operands: the values that the class takes there.
        narrow: the fraction of the bytes that a gathered operand takes (`cast_lookups`).
        until: for each operator, when it runs, if the operators of the class are delayed (`delays.delayed_products`).

    Returns:
        For each operand that was not in `buffers` yet, the number of the first operator that takes it.
    """
    new, extra = [], (move.local_bytes + move.wire_bytes) * narrow if move.kind == "all-gather" else 0.0
    for some in operands:
        key = move.kind, axes, some.number
        if key not in buffers:
            new.append(some.first)
            moved_bytes[key] = move.local_bytes
        elif moved_bytes[key] != move.local_bytes:
            key = *key, move.local_bytes
        last = some.last if until is None else until[some.last]
        found = buffers.setdefault(key, LiveBuffers(extra, some.first, last))
        found.first, found.last = np.minimum(found.first, some.first), np.maximum(found.last, last)
    return np.concatenate(new) if new else np.zeros(0, int)
