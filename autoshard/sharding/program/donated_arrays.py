"""Checks donated arrays: none may be passed again in a later call, and a call cannot donate one array twice.

A program writes over the memory of donated arrays. JAX ends the process if another argument has the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.program.path_patterns import SHOWN, first_few


def without_repeated(leaves: Sequence[Any], donated: Collection[int]) -> list[Any] | None:
    """Return the leaves with copies of donated arrays that occur again; None if no leaf occurs twice.

    It is fast, because it runs at every call. It does not see memory that two arrays share.

    Args:
        leaves: the leaves of the arguments.
        donated: the indices of those that are donated.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return None
    return _distinct(leaves, donated, lambda x: [id(x)])


def without_shared_memory(leaves: Sequence[Any], donated: Collection[int]) -> list[Any]:
    """Return the leaves with copies of donated arrays that share memory with another leaf, on any device.

    `jax.device_put` makes such arrays: it copies no shard that is the same in the old sharding and in the new one.
    """
    return _distinct(leaves, donated, _buffers) if donated else list(leaves)


def _distinct(
    leaves: Sequence[Any], donated: Collection[int], memory_of: Callable[[Any], Iterable[Hashable]]
) -> list[Any]:
    found = list(leaves)
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _compat.is_tracer(x)]
    used = {part for i in arrays if i not in donated for part in memory_of(leaves[i])}
    for i in arrays:
        if i in donated:
            parts = set(memory_of(leaves[i]))
            if parts & used:
                found[i] = _copy(leaves[i])
            used |= parts
    return found


def _copy(array: Any) -> Any:
    if getattr(array, "committed", True):
        return jax.device_put(array, array.sharding, may_alias=False)
    return jax.numpy.copy(array)  # `device_put` to a sharding would commit it


def _buffers(array: Any) -> list[Hashable]:
    """The device and the address of each shard of an array."""
    try:
        return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards]
    except jax.errors.JaxRuntimeError:  # a device that gives no addresses
        return [id(array)]


def donated_error(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> PlanError:
    """The error that names the arrays among the arguments of `name` that were donated."""
    found = _names(paths, [_compat.has_deleted([leaf]) for leaf in leaves])
    what, was, its = ("argument", "was", "its") if len(found) == 1 else ("arguments", "were", "their")
    return PlanError(
        f"auto_shard({name}): {what} {first_few(found)} {was} donated to an earlier call, which reused {its} memory. "
        "Pass what that call returned, or leave the argument out of donate_argnums"
    )


def _names(paths: Sequence[str], donated: Sequence[bool]) -> list[str]:
    """The donated leaves by their paths; an argument of many leaves by its name if all of them were donated."""
    by_argument: dict[str, list[int]] = {}
    for i, path in enumerate(paths):
        by_argument.setdefault(path.partition("/")[0], []).append(i)
    names: list[str] = []
    for argument, members in by_argument.items():
        found = [f"'{paths[i]}'" for i in members if donated[i]]
        whole = len(found) == len(members) > SHOWN
        names += [f"'{argument}' ({len(members)} arrays)"] if whole else found
    return names
