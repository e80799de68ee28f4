"""How given arguments differ from planned ones, path by path, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from autoshard.sharding.program.path_patterns import first_few
from autoshard.sharding.program.tracing import path_of


def leaves_by_path(arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, Any]:
    """Path -> leaf of `(args, kwargs)`. None is a leaf here."""
    flat = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda x: x is None)[0]
    return {path_of(keys[1:]): leaf for keys, leaf in flat}


def differences(planned: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The paths at which shapes or dtypes differ, such as `'1/mask' is None, planned float32[16]`."""
    found = [
        f"'{path}' is {_text(given[path])}, planned {_text(leaf)}"
        for path, leaf in planned.items()
        if path in given and _text(given[path]) != _text(leaf)
    ]
    found += [f"'{path}' {_text(leaf)} is missing" for path, leaf in planned.items() if path not in given]
    more = [path for path, leaf in given.items() if path not in planned and leaf is not None]
    return found + [f"'{path}' {_text(given[path])} is new" for path in more]


def differences_text(planned: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The first few differences; empty if there are none."""
    return first_few(differences(planned, given), "; ")


def _text(leaf: Any) -> str:
    """`float32[8,16]`, or the value itself if it is not an array."""
    if not hasattr(leaf, "shape"):
        if not isinstance(leaf, bool | int | float | complex):
            return f"{leaf!r:.60}"
        leaf = jax.typeof(leaf)
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
