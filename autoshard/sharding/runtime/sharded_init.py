"""Run functions that create state, such as a model's init, with results that are sharded from the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.program.static_leaves import hide_static, is_static, reveal_static
from autoshard.sharding.program.tracing import Traced, path_of
from autoshard.sharding.runtime.dispatch import PlannedSignature


def create_sharded(
    entry: PlannedSignature,
    create: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run `create(*args, **kwargs)` with its result sharded like the planned argument of the same structure.

    Raises:
        PlanError: no argument of the plan has the structure, shapes and dtypes of the result.
    """
    entry.check_target()
    leaves, tree = jax.tree.flatten((args, dict(kwargs or {})), is_leaf=lambda x: x is None)
    # The other leaves are seeds, names and settings.
    arrays = [i for i, x in enumerate(leaves) if not is_static(x, numbers=True)]

    def of_arrays(*values: Any) -> Any:
        merged = list(leaves)
        for i, x in zip(arrays, values, strict=True):
            merged[i] = x
        a, k = jax.tree.unflatten(tree, merged)
        return create(*a, **k)

    pure, rebuild = _compat.split_graph(of_arrays)
    values = [leaves[i] for i in arrays]

    def arrays_of(*values: Any) -> Any:
        return hide_static(pure(*values), f"auto_shard({name}).init: result", entry.traced.static_numbers)

    shapes = jax.eval_shape(arrays_of, *values)
    results = jax.tree_util.tree_flatten_with_path(shapes)[0]
    inputs = _find_argument(entry.traced, [(path_of(k), s) for k, s in results])
    if inputs is not None:
        shardings = [entry.in_shardings[i] for i in inputs]
        out = jax.tree.unflatten(jax.tree.structure(shapes), shardings)
        return rebuild(reveal_static(jax.jit(arrays_of, out_shardings=out)(*values)))
    planned = ", ".join(sorted({p.partition("/")[0] for p in entry.traced.in_paths}))
    raise PlanError(
        f"auto_shard({name}).init: {getattr(create, '__name__', 'the function')} makes {len(results)} arrays "
        f"({', '.join(path_of(k) for k, _ in results[:4])}, ...), which match none of the planned arguments "
        f"({planned}). It must return one of them, with the same structure, shapes and dtypes"
    )


def _find_argument(traced: Traced, results: list[tuple[str, Any]]) -> list[int] | None:
    """Find the inputs with the results' paths, shapes and dtypes: in one argument, or over all arguments."""
    parts: dict[int, dict[str, int]] = {}
    for i, (owner, path) in enumerate(zip(traced.owners, traced.in_paths, strict=True)):
        parts.setdefault(owner, {})[path.partition("/")[2]] = i
    everything = {path: i for i, path in enumerate(traced.in_paths)}
    for part in (*parts.values(), everything):
        inputs = [part.get(path, -1) for path, _ in results]
        if inputs and all(
            i >= 0 and _matches(traced.in_avals[i], s) for i, (_, s) in zip(inputs, results, strict=True)
        ):
            return inputs
    return None


def _matches(aval: Any, shape: Any) -> bool:
    return aval.shape == shape.shape and aval.dtype == shape.dtype
