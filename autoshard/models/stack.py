"""Runs a sequence of layers: a list, or one module whose parameters are stacked and which runs in a scan.

A layer is an `nnx.Module` whose only state is parameters and whose call is `(carry, key, *sides) -> carry`. The carry
is an array or a tuple of arrays. The key is a random key or another array for this layer alone, or None. `sides` are
the same for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models.remat.policies import checkpoint_policy, remat_policies


class WholeStack(nnx.Variable):
    """The values of all layers, `[layers, ...]`, of which `extend_layers` gives every layer the whole.

    It is for a kernel that takes the number of the layer: XLA would copy a slice of an array for a kernel.
    """


def make_layers(make: Callable[[jax.Array], nnx.Module], keys: jax.Array, *, scan: bool) -> nnx.Module:
    """Make layers of one shape, each from its own key.

    Args:
        make: makes a layer from a random key.
        keys: a key for each layer, `[layers]`.
        scan: whether to stack the parameters on a leading `layers` dimension.

    Returns:
        One module with stacked parameters if `scan`, else an `nnx.List`. The values are the same.
    """
    if not scan:
        return nnx.List([make(key) for key in keys])
    # Take the structure from an abstract layer and the values from vmap: no unstacked parameters are allocated.
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))
    return nnx.merge(graph, jax.vmap(lambda key: nnx.state(make(key)))(keys))


def run_layers(
    layers: nnx.Module, carry: Any, keys: jax.Array | None, *, remat: str, sides: tuple[Any, ...] = ()
) -> Any:
    """Apply all layers in order.

    Args:
        layers: the result of `make_layers`.
        carry: the first layer's input.
        keys: a random key for each layer, `[layers]`; another array with an entry for each layer, `[layers, ...]`; or
            None.
        remat: a policy of `remat.policies`, or several, separated by commas, that alternate over the layers. With n
            policies, stacked layers are scanned in groups of n. `remat_problems` checks it.
        sides: further arguments of each layer.

    Returns:
        The last layer's carry.
    """
    stacked, policies = not isinstance(layers, nnx.List), remat_policies(remat)
    count = len(policies)

    def run(graph: Any, index: int | None, params: Any, carry: Any, key: jax.Array | None, sides: Any) -> Any:
        # Slice a layer out of its group inside the rematerialized function. Then the group is saved, not copies of its
        # layers.
        if index is not None:
            params, key = jax.tree.map(lambda leaf: lax.index_in_dim(leaf, index, keepdims=False), (params, key))
        return nnx.merge(graph, params)(carry, key, *sides)

    # `prevent_cse` is not needed in a scan over single layers: its forward and backward bodies are compiled separately,
    # so XLA cannot merge a layer with its recomputation. In a scan over groups, XLA would recompute all layers of a
    # group at once without it.
    options: Any = {"prevent_cse": not stacked or count > 1, "static_argnums": (0, 1)}
    runs = [run if p == "none" else jax.checkpoint(run, policy=checkpoint_policy(p), **options) for p in policies]
    if isinstance(layers, nnx.List):
        for n, layer in enumerate(layers):
            graph, params = nnx.split(layer)
            carry = runs[n % count](graph, None, params, carry, None if keys is None else keys[n], sides)
        return carry
    graph, params = nnx.split(layers)
    if count == 1:
        return lax.scan(
            lambda x, each: (runs[0](graph, None, each[0], x, each[1], sides), None), carry, (params, keys)
        )[0]

    def body(carry: Any, group: Any) -> Any:
        for index, run_one in enumerate(runs):
            carry = run_one(graph, index, group[0], carry, group[1], sides)
        return carry, None

    grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), (params, keys))
    return lax.scan(body, carry, grouped)[0]


def extend_layers(
    layers: nnx.Module, carry: Any, cache: Any, step: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Apply all layers in order, each with its own slice of a cache.

    Args:
        layers: the result of `make_layers`. Stacked layers are sliced, except for what is a `WholeStack`.
        carry: the first layer's input.
        cache: arrays with a leading `layers` dimension.
        step: `(layer, carry, slice) -> (carry, part)`, for one layer and its slice of the cache.

    Returns:
        The last layer's carry, and the parts with a leading `layers` dimension.
    """
    if isinstance(layers, nnx.List):
        parts = []
        for n, layer in enumerate(layers):
            carry, part = step(layer, carry, jax.tree.map(lambda leaf, n=n: leaf[n], cache))
            parts.append(part)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    graph, whole, params = nnx.split(layers, WholeStack, ...)
    return lax.scan(lambda carry, each: step(nnx.merge(graph, whole, each[0]), carry, each[1]), carry, (params, cache))
