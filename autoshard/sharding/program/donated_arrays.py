"""Donated arrays: those of an earlier call must not be passed again, and a call cannot donate one array twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.program.path_patterns import first_few


def without_repeated(leaves: Sequence[Any]) -> list[Any] | None:
    """Return the leaves with copies in place of arrays that occur again; None if no array occurs twice.

    A program with donated arguments would write over the memory of both. JAX refuses that, or crashes.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return None
    known: set[int] = set()
    found = list(leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.Array) and not _compat.is_tracer(x) and id(x) in known:
            found[i] = jax.device_put(x, x.sharding, may_alias=False)
        known.add(id(x))
    return found


def has_donated(arguments: Any) -> bool:
    """Whether an array among the arguments was donated, or deleted."""
    return _compat.has_deleted(jax.tree.leaves(arguments))


def donated_error(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> PlanError:
    """The error that names the arrays among the arguments of `name` that were donated."""
    found = [f"'{path}'" for path, leaf in zip(paths, leaves, strict=True) if has_donated(leaf)]
    return PlanError(
        f"auto_shard({name}): argument {first_few(found)} was donated to an earlier call, which reused its memory. "
        "Pass what that call returned, or leave the argument out of donate_argnums"
    )
