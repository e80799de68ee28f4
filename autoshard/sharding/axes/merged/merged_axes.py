"""How mesh axes shard a merged dimension, such as the heads and head size of a weight that was reshaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from autoshard.spmdrules.core.placement import Spec

Dims = tuple[tuple[int, ...], ...]  # the logical axes of each dimension


def rearranged_axes(
    own: Dims, whole: Dims, spec: Spec, leading: Callable[[tuple[int, ...], int, tuple[str, ...]], tuple[str, ...]]
) -> Spec | None:
    """Return the mesh axes of each dimension of an array after a reshape or a transpose.

    Args:
        own: the logical axes of its dimensions afterwards.
        whole: those before.
        spec: the mesh axes of its dimensions before.
        leading: the mesh axes that shard the first parts of a dimension: `leading(dimension, parts, mesh axes of it)`.

    Returns:
        The mesh axes; None if a logical axis occurs twice, and the order of all logical axes is not the same.
    """
    flat, labels = _flat(whole), whole
    if len({*flat}) < len(flat):
        if _flat(own) != flat:
            return None
        own, labels = _numbered(own), _numbered(whole)
    of_part = dict(zip(labels, spec, strict=True))
    for label, dim, axes in zip(labels, whole, spec, strict=True):
        of_part |= {label[:n]: leading(dim, n, axes) for n in range(1, len(dim))}
    return tuple(merged_axes(dim, of_part) for dim in own)


def _flat(dims: Dims) -> list[int]:
    return [c for dim in dims for c in dim]


def _numbered(dims: Dims) -> Dims:
    """The dimensions with a number for each part, in order."""
    numbers = count()
    return tuple(tuple(next(numbers) for _ in dim) for dim in dims)


def merged_axes(dim: tuple[int, ...], of_dim: Mapping[tuple[int, ...], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the mesh axes of a merged dimension: those of its first part, if no other part is sharded.

    Args:
        dim: the logical axes of the dimension.
        of_dim: the logical axes of each part -> its mesh axes. Other parts are not sharded.

    Example:
        >>> merged_axes((1, 2), {(1,): ("fsdp",), (2,): ()}), merged_axes((1, 2), {(1,): (), (2,): ("fsdp",)})
        (('fsdp',), ())
    """
    parts, rest = [], dim
    while rest:
        part = next((rest[:n] for n in range(len(rest), 0, -1) if rest[:n] in of_dim), rest)
        parts.append(of_dim.get(part, ()))
        rest = rest[len(part) :]
    return parts[0] if parts and not any(parts[1:]) else ()
