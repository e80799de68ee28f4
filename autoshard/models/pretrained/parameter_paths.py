"""Parameters by path, such as `segments/0/layers/0/attention/wq`, and the tree that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by `/`-joined path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def parameters_of(model: Any) -> dict[str, Any]:
    """Return the arrays of an nnx module by path."""
    return by_path(nnx.to_pure_dict(nnx.state(model)))


def as_tree(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Undo `by_path`. Names that are numbers are indices of lists.

    >>> as_tree({"blocks/0/w": 1, "norm": 2})
    {'blocks': {0: {'w': 1}}, 'norm': 2}
    """
    found: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        *outer, last = (int(name) if name.isdigit() else name for name in path.split("/"))
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return found


def owner_of(model: Any, path: str) -> tuple[Any, str]:
    """Return the module that has the weight with this path, and the weight's name in it."""
    *outer, name = path.split("/")
    parent: Any = model
    for level in outer:
        parent = parent[int(level)] if level.isdecimal() else getattr(parent, level)
    return parent, name
