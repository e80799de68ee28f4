"""Arrays that were donated to an earlier call, and must not be passed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.program.path_patterns import first_few


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
