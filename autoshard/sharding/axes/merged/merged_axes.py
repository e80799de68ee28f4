"""How mesh axes shard a merged dimension, such as the heads and head size of a weight that was reshaped."""

from __future__ import annotations

from collections.abc import Mapping


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
