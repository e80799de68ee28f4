"""The parts of an array that the iterations of a loop compute: slices of a stack, or chunks of a dimension."""

from __future__ import annotations

from collections.abc import Callable, Collection

from autoshard.spmdrules.core.placement import Spec

Leaves = tuple[tuple[int, ...], ...]
Leading = Callable[[tuple[int, ...], int, tuple[str, ...]], tuple[str, ...]]


def loop_slices(leaves: Leaves, spec: Spec, stacked: Collection[int], leading: Leading) -> list[tuple[Leaves, Spec]]:
    """Return the logical axes and the spec of an array, and of each part that one iteration of a loop computes.

    Args:
        leaves: its logical axes.
        spec: its spec.
        stacked: the logical axes that count iterations.
        leading: the mesh axes that shard the first parts of a dimension: `leading(dimension, parts, mesh axes of it)`.

    Example:
        >>> loop_slices(((0,), (1,)), ((), ("fsdp",)), {0}, lambda dim, parts, axes: axes)
        [(((0,), (1,)), ((), ('fsdp',))), (((1,),), (('fsdp',),))]
    """
    slices = [(leaves, spec)]
    if leaves and any(c in stacked for c in leaves[0]):
        slices.append((leaves[1:], spec[1:]))  # the slice of one iteration, or one layer of a group
        if len(leaves[0]) > 1:
            slices.append(((leaves[0][1:], *leaves[1:]), ((), *spec[1:])))
            outer = leading(leaves[0], 1, spec[0])
            slices.append(((leaves[0][:1], leaves[0][1:], *leaves[1:]), (outer, (), *spec[1:])))
    return slices + _chunks(leaves, spec, stacked, leading)


def _chunks(leaves: Leaves, spec: Spec, stacked: Collection[int], leading: Leading) -> list[tuple[Leaves, Spec]]:
    """Return the logical axes and specs of one chunk and of the stack of chunks, for each dimension in chunks.

    A dimension is in chunks if a loop runs over its second logical axis.
    """
    found: list[tuple[Leaves, Spec]] = []
    for d, dim in enumerate(leaves):
        if len(dim) == 2 and dim[1] in stacked and dim[0] not in stacked:
            chunk = (*leaves[:d], dim[:1], *leaves[d + 1 :])
            sharded = (*spec[:d], leading(dim, 1, spec[d]), *spec[d + 1 :])
            found += [(chunk, sharded), ((dim[1:], *chunk), ((), *sharded))]
    return found
