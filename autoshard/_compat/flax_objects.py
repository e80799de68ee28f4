"""Flax objects among the arguments of a function: nnx modules and variables, and annotated parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import linen, nnx
from flax.linen import spmd as linen_spmd


def has_graph_nodes(tree: Any) -> bool:
    """Returns whether a pytree contains nnx objects: modules, optimizers, metrics, random streams or variables.

    An `nnx.State` and the variables in it do not count: code that splits and merges by itself uses it as a pytree.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State)))
    return any(isinstance(x, (nnx.Pytree, nnx.Variable)) for x in leaves)


def nnx_jit(fn: Any, make: Any) -> tuple[Any, Any]:
    """Returns `nnx.jit(fn)` with its inner `jax.jit(pure)` replaced by `make(pure)`, and that replacement."""
    wrapped = nnx.jit(fn)
    pure = make(wrapped.jitted_fn.__wrapped__)  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.jitted_fn = pure  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped, pure


def nnx_pure_call(wrapped: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `call(pure_args, pure_kwargs)` as `wrapped` (from `nnx_jit`) would call its inner function."""
    args, kwargs = nnx.clone((args, kwargs))
    with nnx.update_context(wrapped):
        pure_args, pure_kwargs = wrapped._get_pure_args_kwargs(args, kwargs)
        return call(pure_args, pure_kwargs)


def nnx_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns the path of each array leaf of arguments with nnx objects, in `nnx.jit`'s flattening order."""
    return [path for path, _ in _graph_leaves(args, kwargs)]


def _graph_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, owner) for each array leaf, in the order in which `nnx.jit` flattens the arguments.

    The owner is the variable or box that holds the array, or the array itself. A variable that several objects share
    has the path of its first occurrence. A variable's value can be a pytree.
    """
    with nnx.split_context() as context:
        for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_node_or_owner)[0]:
            owners = (
                [((), leaf)]
                if isinstance(leaf, linen.Partitioned) or not _is_node_or_owner(leaf)
                else (context.flatten(leaf)[1])
            )
            for path, owner in owners:
                for inside, _ in jax.tree_util.tree_flatten_with_path(owner)[0]:
                    inner_keys = inside[1:] if isinstance(owner, nnx.Variable) else inside
                    parts = [jax.tree_util.keystr(k, simple=True, separator="/") for k in (keys[1:], inner_keys) if k]
                    yield "/".join([parts[0], *map(str, path), *parts[1:]]), owner


def _is_node_or_owner(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable, linen.Partitioned))


def split_graph(create: Any) -> tuple[Any, Any]:
    """Splits the objects that `create` returns into a graph definition and a state.

    Returns:
        A pure function that calls `create` and returns the state, and a function that rebuilds the objects from a
        state. The second works only after the first was called or traced.
    """
    graphdefs: list[Any] = []  # holds the graph definition of the last call, None if there are no objects

    def pure(*args: Any) -> Any:
        created = create(*args)
        if not has_graph_nodes(created):
            graphdefs[:] = [None]
            return created
        graphdef, state = nnx.split(created)
        graphdefs[:] = [graphdef]
        return state

    return pure, lambda state: state if graphdefs[0] is None else nnx.merge(graphdefs[0], state)


def annotated_specs(args: tuple[Any, ...], kwargs: dict[str, Any], graph: bool) -> list[Any]:
    """Returns the annotated `PartitionSpec` of each array leaf in flat order, None for a leaf without annotation.

    Annotations are `linen.Partitioned` boxes, whose logical names are mapped by the current axis rules, and the
    metadata of nnx variables.
    """
    if graph:
        return [_annotation(owner) for _, owner in _graph_leaves(args, kwargs)]
    owners = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, (nnx.Variable, linen.Partitioned)))
    return [_annotation(owner) for owner in owners for _ in jax.tree.leaves(owner)]


def _annotation(leaf: Any) -> Any:
    names: Any = None
    if isinstance(leaf, linen.LogicallyPartitioned):
        names = linen_spmd.logical_to_mesh_axes(leaf.names)
    elif isinstance(leaf, linen.Partitioned):
        names = leaf.names
    elif isinstance(leaf, nnx.Variable):
        names = leaf.get_metadata().get("out_sharding")
    return None if names is None or not any(names) else jax.sharding.PartitionSpec(*names)
