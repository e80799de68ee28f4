"""Arguments that are None where an earlier call passed arrays."""

from __future__ import annotations

from typing import Any

import jax

from autoshard.errors import PlanError
from autoshard.sharding.program.argument_names import named_path
from autoshard.sharding.program.path_patterns import first_few
from autoshard.sharding.program.tracing import Traced, path_of


def absent_error(arguments: Any, planned: Traced | None) -> PlanError | None:
    """Return the error that names what is None among arguments with which a function cannot be traced.

    Args:
        arguments: `(args, kwargs)`.
        planned: the function with the arguments of an earlier call.

    Returns:
        None if nothing is None where the earlier call passed arrays.
    """
    if planned is None:
        return None
    leaves = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=lambda x: x is None)[0]
    absent = [named_path(path_of(keys[1:]), planned.arguments) for keys, leaf in leaves if leaf is None]
    found = []
    for path in absent:
        below = [(p, a) for p, a in zip(planned.in_names, planned.in_avals, strict=True) if _is_in(p, path)]
        if below:
            shape = below[0][1].str_short() if below[0][0] == path else f"{len(below)} arrays"
            found.append(f"'{path}' is None, but was {shape}")
    if not found:
        return None
    return PlanError(
        f"auto_shard({planned.name}): the function fails with an argument that is None: {first_few(found)} in an "
        "earlier call. Pass the array, or let the function accept None"
    )


def _is_in(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")
