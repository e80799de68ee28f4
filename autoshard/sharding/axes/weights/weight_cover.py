"""Finds axes for tensor parallelism in weights that have none of the usual ones, such as those of recurrent cells.

The usual axes are hidden units, heads, classes, vocabulary and experts (`roles`). Weights that have none of them stay
whole: square weights of the residual stream, gates that the program concatenates, a weight that is used twice (`tanh(x
@ w) @ w.T`), and the kernels of depthwise convolutions. Any axis of such a weight can be sharded too. If these weights
are a large part of all weights, axes are added one by one: each time the one that shards the most bytes of weights that
are still whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from autoshard.sharding.axes.axis_uses import AxisUses
from autoshard.sharding.axes.constants import WHOLE_WEIGHTS_SHARE
from autoshard.sharding.axes.logical_axes import LogicalAxes


def cover_weights(
    axes: LogicalAxes, use: AxisUses, weight_bytes: Mapping[int, int], shardable: Collection[int], data: Collection[int]
) -> list[int]:
    """The axes to shard besides `shardable`, in the order in which they are added.

    Axes that shard equally many bytes are added in this order: an axis that a weight produces before one that weights
    only contract, because its products are not partial sums; then an axis that only hidden layers have before one of
    the data.

    Args:
        axes: the logical axes.
        use: how operators use them.
        weight_bytes: the bytes of each parameter.
        shardable: the axes that tensor parallelism shards in any case.
        data: the axes that data have.
    """
    # Weight -> axes that it has both when stored and when used. A minor axis of a dimension is not enough to shard it.
    axes_of: dict[int, set[int]] = defaultdict(set)
    for c in use.weights.keys() - axes.stacked - use.inner - use.windows:
        for v in frozenset[int]().union(*use.weights[c]) & weight_bytes.keys():
            if any(dim[:1] == (c,) for dim in axes.of_value[v]):
                axes_of[v].add(c)
    whole = {v for v, found in axes_of.items() if not found & set(shardable)}
    most_whole = WHOLE_WEIGHTS_SHARE * sum(weight_bytes[v] for v in axes_of)
    added: list[int] = []
    while sum(weight_bytes[v] for v in whole) > most_whole:
        gains: dict[int, int] = defaultdict(int)
        for v in whole:
            for c in axes_of[v]:
                gains[c] += weight_bytes[v]
        added.append(max(gains, key=lambda c: (gains[c], bool(use.produced.get(c)), c not in data, axes.sizes[c], -c)))
        whole = {v for v in whole if added[-1] not in axes_of[v]}
    return added
