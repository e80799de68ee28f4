"""Functions that create state, such as a model's init, run so that every result is made on its shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from autoshard import _compat
from autoshard.errors import PlanError
from autoshard.sharding.program.tracing import Traced, path_of
from autoshard.sharding.runtime.dispatch import Entry


def born_sharded(
    entry: Entry, create: Callable[..., Any], args: tuple[Any, ...], name: str, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Runs `create(*args, **kwargs)` with its result sharded as the argument of a plan that has its structure."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs or {})), is_leaf=lambda x: x is None)
    arrays = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]  # the rest are seeds, names, settings

    def with_rest(*given: Any) -> Any:
        merged = list(leaves)
        for i, x in zip(arrays, given, strict=True):
            merged[i] = x
        a, k = jax.tree.unflatten(tree, merged)
        return create(*a, **k)

    pure, rebuild = _compat.split_graph(with_rest)
    given = [leaves[i] for i in arrays]
    shapes = jax.eval_shape(pure, *given)
    wanted = jax.tree_util.tree_flatten_with_path(shapes)[0]
    picked = _find_argument(entry.traced, [(path_of(k), s) for k, s in wanted])
    if picked is not None:
        shardings = [entry.in_shardings[i] for i in picked]
        out = jax.tree.unflatten(jax.tree.structure(shapes), shardings)
        return rebuild(jax.jit(pure, out_shardings=out)(*given))
    have = ", ".join(sorted({p.partition("/")[0] for p in entry.traced.in_paths}))
    raise PlanError(
        f"auto_shard({name}).init: {getattr(create, '__name__', 'the function')} makes {len(wanted)} arrays "
        f"({', '.join(path_of(k) for k, _ in wanted[:4])}, ...), which fit none of the planned arguments ({have}). "
        "It must return one of them, with the same structure, shapes and dtypes"
    )


def _find_argument(traced: Traced, wanted: list[tuple[str, Any]]) -> list[int] | None:
    """The inputs that have these paths, shapes and dtypes: one argument's, or all."""
    parts: dict[int, dict[str, int]] = {}
    for i, (owner, path) in enumerate(zip(traced.owners, traced.in_paths, strict=True)):
        parts.setdefault(owner, {})[path.partition("/")[2]] = i
    everything = {path: i for i, path in enumerate(traced.in_paths)}
    for part in (*parts.values(), everything):
        picked = [part.get(path, -1) for path, _ in wanted]
        if picked and all(i >= 0 and _fits(traced.in_avals[i], s) for i, (_, s) in zip(picked, wanted, strict=True)):
            return picked
    return None


def _fits(aval: Any, shape: Any) -> bool:
    return aval.shape == shape.shape and aval.dtype == shape.dtype
