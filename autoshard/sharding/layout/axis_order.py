"""The order of several mesh axes that shard one factor of an operator, and the permutes that an order needs.

The shards of a dimension are numbered by its mesh axes, major to minor. A collective over the minor axes keeps the
other shards where they are: an all-gather over `fsdp` turns `(tp, fsdp)` into `(tp,)`. It cannot turn `(fsdp, tp)` into
`(tp,)`, because a shard of the result then consists of shards of devices with other `tp`. XLA sends each shard to
another device first, by a collective-permute of the whole shard.

So no permute is needed if the axes that an array keeps come first in both specs, in the same order. Of the orders that
suit one of the arrays, the one whose permutes send the fewest bytes is chosen. The order of the mesh wins ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoshard.spmdrules.core.placement import shard_count
from autoshard.spmdrules.core.rule import Dims

Factors = Mapping[str, str | None]
Array = tuple[int, Dims, float, Sequence[tuple[str, ...]]]  # number in `Move.array`, factors, unsharded bytes, spec
Permute = tuple[int, tuple[str, ...], float]  # number in `Move.array`, mesh axes, bytes of a shard


def order_axes(factors: Factors, arrays: Sequence[Array], mesh: Mapping[str, int]) -> tuple[Factors, list[Permute]]:
    """Order the mesh axes of a strategy, and find the permutes that it needs in this order.

    Args:
        factors: mesh axis -> the factor that it shards, or None, in mesh order.
        arrays: the operands and results, with the specs that they have before and after the operator.
        mesh: mesh axis -> size.

    Returns:
        The same table in the chosen order, and the permutes.

    >>> weight = 0, (("k",), ("n",)), 1024.0, ((), ("tp", "fsdp"))
    >>> order_axes({"fsdp": "n", "tp": "n"}, [weight], {"fsdp": 2, "tp": 4})
    ({'tp': 'n', 'fsdp': 'n'}, [])
    """
    used = [factor for axis, factor in factors.items() if factor is not None and mesh[axis] > 1]
    shared = {factor for factor in used if used.count(factor) > 1}
    concerned = [
        array for array in arrays if any(len(axes) > 1 for axes in array[3]) or any(map(shared.intersection, array[1]))
    ]
    best = factors, list(_permutes(factors, concerned, mesh))
    if not best[1]:
        return best
    for _, dims, _, spec in concerned:
        kept = [a for dim, axes in zip(dims, spec, strict=True) for a in axes if factors.get(a) in dim]
        option = {axis: factors[axis] for axis in (*kept, *(a for a in factors if a not in kept))}
        found = list(_permutes(option, concerned, mesh))
        if sum(size for _, _, size in found) < sum(size for _, _, size in best[1]):
            best = option, found
    return best


def _permutes(factors: Factors, arrays: Sequence[Array], mesh: Mapping[str, int]) -> Iterator[Permute]:
    """Yield the permutes if mesh axes shard their factors in this order. An array has at most one."""
    for number, dims, nbytes, spec in arrays:
        computed = [[a for f in dim for a, g in factors.items() if g == f and mesh[a] > 1] for dim in dims]
        own = [[a for a in axes if mesh[a] > 1] for axes in spec]
        moved = [a for c, o in zip(computed, own, strict=True) for a in _reordered(c, o)]
        if moved and nbytes:
            shards = max(shard_count(tuple(map(tuple, side)), mesh) for side in (computed, own))
            yield number, tuple(a for a in mesh if a in moved), nbytes / shards


def _reordered(computed: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """The axes of both orders from the first one on that is not at the same place in both."""
    kept = [a for a in own if a in computed]
    same = 0
    while same < len(kept) and own[same] == computed[same]:
        same += 1
    return kept[same:]
