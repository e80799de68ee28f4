"""Splits the arguments of a module's call into data and static arguments, which are part of the plan's key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from autoshard._shown import shown
from autoshard.sharding.program.static_leaves import frozen


@shown
@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of a call, with the static ones split off.

    Attributes:
        args: positional arguments; None in place of a static one, so that the others keep their positions and paths.
        kwargs: keyword arguments without the static ones.
        statics: `(position or keyword, structure, values)`: the static leaves of an argument by index; or the whole
            argument, with structure None.
        key: equal for calls whose static arguments have equal values and types.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    statics: tuple[tuple[int | str, Any, Any], ...]
    key: Any

    def merge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Insert the static arguments into other data."""
        merged: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}  # positions and names
        for place, tree, value in self.statics:
            if tree is not None:
                holes = tree.flatten_up_to(merged[place])
                value = jax.tree.unflatten(tree, [value.get(i, x) for i, x in enumerate(holes)])
            merged[place] = value
        return tuple(merged.pop(i) for i in range(len(args))), merged


def split_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Arguments:
    """Split the static arguments off a call of `name`. Its first argument (state or random keys) is always data.

    Raises:
        PlanError: an argument is neither an array nor hashable.
    """
    data: dict[int | str, Any] = {0: args[0]}
    statics, keys = [], []
    for place, value in [*enumerate(args[1:], start=1), *sorted(kwargs.items())]:
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_graph)
        static = {i: x for i, x in enumerate(leaves) if not _is_array(x) and not isinstance(x, float)}
        where = f"auto_shard({name}): argument '{place}'"
        if leaves and not static:
            data[place] = value
        elif any(map(_is_array, leaves)):
            data[place] = jax.tree.unflatten(tree, [None if i in static else x for i, x in enumerate(leaves)])
            statics.append((place, tree, static))
            keys.append((place, tree, tuple((i, frozen(x, where)) for i, x in static.items())))
        else:
            statics.append((place, None, value))
            keys.append((place, None, frozen(value, where)))
    keywords = {k: data[k] for k in kwargs if k in data}
    return Arguments(tuple(data.get(i) for i in range(len(args))), keywords, tuple(statics), tuple(keys))


def _is_graph(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def _is_array(value: Any) -> bool:
    return _is_graph(value) or (hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type))
