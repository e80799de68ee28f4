"""Reshapes that merge or split dimensions in any order: each device merges and splits the rows that it holds.

`[time, rows]` with rows over n devices becomes `[time, n, rows / n]`, `[n, time, rows / n]` and then
`[n * time * rows / n]`, whose shards are contiguous. On a device this is a reshape of its own shard, without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

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
    return [_merged(layout, after, _in_parts(layout, before, args[0]), op.eqn.params["new_sizes"])]


def _is_reordered(layout: Layout, dim: tuple[int, ...]) -> bool:
    """Whether the elements of a dimension are in another order: a part is sharded behind another one that is not."""
    if dim not in layout.axes.unordered:
        return False
    whole = [layout.axes.sizes[c] // n for c, n in zip(dim, layout.shards_of_parts(dim), strict=True)]
    sharded = [n > 1 for n in layout.shards_of_parts(dim)]
    return any(n > 1 and any(sharded[at + 1 :]) for at, n in enumerate(whole))


def _in_parts(layout: Layout, leaves: Leaves, x: Any) -> Any:
    """Split every dimension into its parts, in their own order."""
    shape: list[int] = []
    order: list[int] = []
    for dim in leaves:
        sizes, at = [layout.axes.sizes[c] for c in dim], len(shape)
        if not _is_reordered(layout, dim):
            order += range(at, at + len(dim))
            shape += sizes
            continue
        shards = layout.shards_of_parts(dim)
        order += itertools.chain.from_iterable((at + part, at + len(dim) + part) for part in range(len(dim)))
        shape += [*shards, *(size // n for size, n in zip(sizes, shards, strict=True))]
    x = lax.transpose(lax.reshape(x, shape), order)
    return lax.reshape(x, [layout.axes.sizes[c] for dim in leaves for c in dim])


def _merged(layout: Layout, leaves: Leaves, x: Any, shape: tuple[int, ...]) -> Any:
    """Merge the parts of every dimension; `shape` is the result's."""
    split: list[int] = []
    order: list[int] = []
    for dim in leaves:
        sizes, at = [layout.axes.sizes[c] for c in dim], len(split)
        if not _is_reordered(layout, dim):
            order += range(at, at + len(dim))
            split += sizes
            continue
        pairs = [(n, size // n) for size, n in zip(sizes, layout.shards_of_parts(dim), strict=True)]
        order += [*range(at, at + 2 * len(dim), 2), *range(at + 1, at + 2 * len(dim), 2)]
        split += itertools.chain.from_iterable(pairs)
    return lax.reshape(lax.transpose(lax.reshape(x, split), order), shape)
