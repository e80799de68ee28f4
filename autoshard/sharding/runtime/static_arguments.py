"""Which arguments of a module's call are data, and which are static and part of the plan's key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen, nnx

from autoshard.errors import PlanError


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of a call after the module, the static ones taken out.

    Attributes:
        args: by position; None where a static one stood, so that the others keep their places and paths.
        kwargs: by keyword, without the static ones.
        statics: (position or keyword, structure, what was taken out): a whole argument where the structure is None.
        key: equal for calls whose static arguments are equal and of equal types.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    statics: tuple[tuple[int | str, Any, Any], ...]
    key: Any

    def merge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other data with these static arguments."""
        merged: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}  # positions and names
        for place, tree, value in self.statics:
            if tree is not None:
                holes = tree.flatten_up_to(merged[place])
                value = jax.tree.unflatten(tree, [value.get(i, x) for i, x in enumerate(holes)])
            merged[place] = value
        return tuple(merged.pop(i) for i in range(len(args))), merged


def split_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Arguments:
    """Takes the static arguments out of a call of `name`, whose first argument (state or keys) is always data.

    Raises:
        PlanError: an argument is neither an array nor hashable.
    """
    data: dict[int | str, Any] = {0: args[0]}
    statics, keys = [], []
    for place, value in [*enumerate(args[1:], start=1), *sorted(kwargs.items())]:
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_graph)
        taken = {i: x for i, x in enumerate(leaves) if not _is_array(x) and not isinstance(x, float)}
        where = f"auto_shard({name}): argument '{place}'"
        if leaves and not taken:
            data[place] = value
        elif any(map(_is_array, leaves)):
            data[place] = jax.tree.unflatten(tree, [None if i in taken else x for i, x in enumerate(leaves)])
            statics.append((place, tree, taken))
            keys.append((place, tree, tuple((i, frozen(x, where)) for i, x in taken.items())))
        else:
            statics.append((place, None, value))
            keys.append((place, None, frozen(value, where)))
    kept = {k: data[k] for k in kwargs if k in data}
    return Arguments(tuple(data.get(i) for i in range(len(args))), kept, tuple(statics), tuple(keys))


def _is_graph(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def _is_array(value: Any) -> bool:
    return _is_graph(value) or (hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type))


def frozen(value: Any, where: str) -> Any:
    """A hashable stand-in for a static value, equal for values that are equal and of one type: True, 1, 1.0 are three.

    Args:
        value: a hashable value, or lists, mappings, sets, linen modules and other dataclasses of such values.
        where: how messages call it; where it is empty, objects without a hash are told apart by identity.

    Raises:
        PlanError: there is no such stand-in.
    """
    if isinstance(value, Mapping):
        return type(value), tuple((frozen(k, where), frozen(v, where)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(x, where) for x in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(frozen(x, where) for x in value)
    if isinstance(value, float):
        return float, value.hex()  # not a number equals itself here, and 0.0 is not -0.0
    if isinstance(value, linen.Module) or (dataclasses.is_dataclass(value) and type(value).__hash__ is None):
        fields = [f.name for f in dataclasses.fields(value) if f.name != "parent"]
        return type(value), tuple((f, frozen(getattr(value, f, None), where)) for f in fields)
    try:
        hash(value)
    except TypeError:
        if not where:
            return type(value), id(value)
        raise PlanError(
            f"{where} holds a {type(value).__name__}, which is neither an array nor hashable, so calls with it cannot "
            "be told apart: give its class a __hash__, or make it an array"
        ) from None
    return type(value), value
