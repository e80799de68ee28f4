"""Warns if a function is planned again and again because a static leaf has another value at each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from autoshard._tracebacks import users_stacklevel
from autoshard.errors import AutoshardWarning
from autoshard.sharding.program.argument_names import argument_names, named_path
from autoshard.sharding.program.static_leaves import StaticLeaf
from autoshard.sharding.program.tracing import name_of, path_of
from autoshard.sharding.runtime.constants import MANY_STATIC_VALUES

_ANY = StaticLeaf(None)


class StaticChanges:
    """The static leaves of the signatures that were planned for a function."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.values: dict[Any, dict[str, set[StaticLeaf]]] = {}  # structure without static leaves -> path -> values

    def __repr__(self) -> str:
        return f"StaticChanges({name_of(getattr(self, 'fn', None))})"

    def note(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], types: Any) -> None:
        """Note the static leaves of a new signature.

        Args:
            arguments: positional and keyword arguments, with `StaticLeaf`s.
            types: the types of its arrays. Signatures with other types are counted separately.
        """
        flat, tree = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=_is_static)
        names = argument_names(self.fn)
        leaves = {named_path(path_of(keys[1:]), names): x for keys, x in flat if _is_static(x)}
        if not leaves:
            return
        general = jax.tree.structure(jax.tree.unflatten(tree, [_ANY if _is_static(x) else x for _, x in flat]))
        values = self.values.setdefault((general, types), {})
        for path, leaf in leaves.items():
            found = values.setdefault(path, set())
            if leaf in found:
                continue
            found.add(leaf)
            if len(found) == MANY_STATIC_VALUES:
                warnings.warn(
                    f"auto_shard({name_of(self.fn)}): argument '{path}' is static, because it is neither an array nor "
                    f"a number, and has had {len(found)} values, the last {leaf!r:.60}. The function is planned and "
                    "compiled for each of them. If it is not needed, remove it from the arguments",
                    AutoshardWarning,
                    stacklevel=users_stacklevel(),
                )


def _is_static(x: Any) -> bool:
    return isinstance(x, StaticLeaf)
