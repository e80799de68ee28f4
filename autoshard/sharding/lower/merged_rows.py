"""Reshapes that merge or split dimensions in any order: each device merges and splits the rows that it holds.

`[time, rows]` with rows over n devices becomes `[time, n, rows / n]`, `[n, time, rows / n]` and then
`[n * time * rows / n]`, whose shards are contiguous. On a device this is a reshape of its own shard, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from autoshard.sharding.axes.logical_axes import Leaves
from autoshard.sharding.axes.merged.row_order import is_plain_reshape
from autoshard.sharding.layout.layout import Layout
from autoshard.spmdrules.ir.program import Op


def reshaped_rows(layout: Layout, op: Op, args: Sequence[Any]) -> list[Any] | None:
    """Return the results of a reshape that merges or splits dimensions whose elements are in another order.

    Return None for any other operator, and where this layout keeps the elements in order.
    """
    if not is_plain_reshape(op):
        return None
    before, after = (layout.axes.of_value[v] for v in (op.operands[0], op.results[0]))
    if before == after or not any(_is_reordered(layout, dim) for dim in (*before, *after)):
        return None
    shape, order = _stored_parts(layout, before)
    x = lax.transpose(lax.reshape(args[0], shape), order)
    shape, order = _stored_parts(layout, after)
    x = lax.transpose(lax.reshape(x, [shape[at] for at in order]), np.argsort(order).tolist())
    return [lax.reshape(x, op.eqn.params["new_sizes"])]


def _is_reordered(layout: Layout, dim: tuple[int, ...]) -> bool:
    """Whether the elements of a dimension are in another order: a part is sharded behind another one that is not."""
    if dim not in layout.axes.unordered:
        return False
    shards = layout.shards_of_parts(dim)
    whole = [layout.axes.sizes[c] // n for c, n in zip(dim, shards, strict=True)]
    return any(n > 1 and max(shards[at + 1 :], default=1) > 1 for at, n in enumerate(whole))


def _stored_parts(layout: Layout, leaves: Leaves) -> tuple[list[int], list[int]]:
    """Return the sizes of all parts in the order of the elements, and the transposition to the order of the program.

    A reordered dimension stores the shards of all its parts, then the elements of a shard.
    """
    shape: list[int] = []
    order: list[int] = []
    for dim in leaves:
        sizes, first, n = [layout.axes.sizes[c] for c in dim], len(shape), len(dim)
        if _is_reordered(layout, dim):
            shards = layout.shards_of_parts(dim)
            shape += [*shards, *(size // count for size, count in zip(sizes, shards, strict=True))]
            order += [at for part in range(first, first + n) for at in (part, part + n)]
        else:
            shape += sizes
            order += range(first, first + n)
    return shape, order
