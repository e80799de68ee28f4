"""Layers one after the other: a list of them, or one whose parameters are stacked and scanned over.

A layer is an `nnx.Module` whose only state is parameters and whose call is `(carry, key) -> carry`. What is
carried is an array or a tuple of arrays, `key` one random key for each layer, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

# Names a config may give to `remat`, and what they mean to `jax.checkpoint`; `none` does not checkpoint.
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def remat_policies(remat: str) -> tuple[str, ...]:
    """The policies that layers take in turn: `full,none` is full for the first, none for the second, and again.

    >>> remat_policies("full,none")
    ('full', 'none')
    """
    return tuple(part.strip() for part in remat.split(","))


def remat_problems(remat: str, layers: int, *, scan: bool) -> list[str]:
    """What is wrong with a `remat` for so many layers; nothing where it can be run."""
    names = remat_policies(remat)
    if any(name not in REMAT_POLICIES for name in names):
        known = ", ".join(REMAT_POLICIES)
        return [f"remat is {remat!r}; choose one of {known}, or several with commas for layers in turn"]
    if scan and layers % len(names):
        return [f"remat is {remat!r}; {layers} layers that are scanned over do not divide into groups of {len(names)}"]
    return []


def make_layers(make: Callable[[jax.Array], nnx.Module], keys: jax.Array, *, scan: bool) -> nnx.Module:
    """Layers of one shape, each from its own key.

    Args:
        make: makes a layer from a random key.
        keys: a key for each layer, `[layers]`.
        scan: whether their parameters are stacked on a leading `layers` dimension.

    Returns:
        One module with stacked parameters, or an `nnx.List`; of the same values.
    """
    if not scan:
        return nnx.List([make(key) for key in keys])
    # The structure from an abstract layer and the values under vmap: no layer's parameters exist unstacked.
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
    return nnx.merge(graph, jax.vmap(lambda key: nnx.state(make(key)))(keys))


def run_layers(layers: nnx.Module, carry: Any, keys: jax.Array | None, *, remat: str) -> Any:
    """All layers in turn. Each is a pure function of its parameters: what remat and scan take.

    Args:
        layers: as `make_layers` gave them.
        carry: what the first layer takes.
        keys: a key for each layer, `[layers]`, or None.
        remat: what a layer's backward pass keeps: a name in `REMAT_POLICIES`, or several with commas that layers take
            in turn. Stacked layers are then scanned over in groups of as many.

    Raises:
        ValueError: a `remat` that is none, or does not divide stacked layers.
    """
    stacked, policies = not isinstance(layers, nnx.List), remat_policies(remat)
    count = len(policies)

    def run(graph: Any, index: int | None, params: Any, carry: Any, key: jax.Array | None) -> Any:
        # A layer of a group is taken out of it in here, so that remat keeps the group and no copies of its layers.
        if index is not None:
            params, key = jax.tree.map(lambda leaf: lax.index_in_dim(leaf, index, keepdims=False), (params, key))
        return nnx.merge(graph, params)(carry, key)

    # The body of a scan over single layers is compiled alone: nothing could be merged with a recomputation. Of a group
    # the compiler would recompute all layers at once.
    given: Any = {"prevent_cse": not stacked or count > 1, "static_argnums": (0, 1)}
    runs = [run if name == "none" else jax.checkpoint(run, policy=REMAT_POLICIES[name], **given) for name in policies]
    if isinstance(layers, nnx.List):
        for n, layer in enumerate(layers):
            graph, params = nnx.split(layer)
            carry = runs[n % count](graph, None, params, carry, None if keys is None else keys[n])
        return carry
    graph, params = nnx.split(layers)
    if count == 1:
        return lax.scan(lambda x, each: (runs[0](graph, None, each[0], x, each[1]), None), carry, (params, keys))[0]

    def body(carry: Any, group: Any) -> Any:
        for index, each in enumerate(runs):
            carry = each(graph, index, group[0], carry, group[1])
        return carry, None

    grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), (params, keys))
    return lax.scan(body, carry, grouped)[0]


def extend_layers(
    layers: nnx.Module, carry: Any, kept: Any, step: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """All layers in turn, each with its own part of what is kept of earlier positions.

    Args:
        layers: as `make_layers` gave them.
        carry: what the first layer takes.
        kept: arrays with a leading `layers` dimension.
        step: `(layer, carry, kept) -> (carry, kept)`.

    Returns:
        The last layer's carry, and what all keep now.
    """
    if isinstance(layers, nnx.List):
        parts = []
        for n, layer in enumerate(layers):
            carry, part = step(layer, carry, jax.tree.map(lambda leaf, n=n: leaf[n], kept))
            parts.append(part)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    graph, params = nnx.split(layers)
    return lax.scan(lambda carry, each: step(nnx.merge(graph, each[0]), carry, each[1]), carry, (params, kept))
