"""Layers one after the other: a list of them, or one whose parameters are stacked and scanned over.

A layer is an `nnx.Module` whose only state is parameters and whose call is `(carry, key) -> carry`. What is
carried is an array or a tuple of arrays, `key` one random key for each layer, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
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
        remat: what a layer's backward pass keeps: a name in `REMAT_POLICIES`.
    """
    stacked = not isinstance(layers, nnx.List)

    def run(graph: Any, params: Any, carry: Any, key: jax.Array | None) -> Any:
        return nnx.merge(graph, params)(carry, key)

    if remat != "none":
        # A scan's body is compiled alone: nothing outside it could be merged with the recomputation.
        run = jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=not stacked, static_argnums=0)
    if stacked:
        graph, params = nnx.split(layers)
        return lax.scan(lambda carry, layer: (run(graph, layer[0], carry, layer[1]), None), carry, (params, keys))[0]
    for index, layer in enumerate(layers):
        carry = run(*nnx.split(layer), carry, None if keys is None else keys[index])
    return carry
