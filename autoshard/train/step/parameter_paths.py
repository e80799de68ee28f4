"""Paths of parameters as text, and globs over them."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax


def path_name(path: Sequence[Any]) -> str:
    """Write a pytree key path as `layers/0/attention/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches one of the globs. `*` also matches `/`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
