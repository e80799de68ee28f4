"""Stacks of layers as arrays of stages: `[L, ...]` to `[N, K, ...]` and back, for L layers on N stages.

A stage has K slots for its layers. K is L / N, rounded up. If N does not divide L, the first stages have K layers, and
each of the others has a first slot without a layer of its own. Such a slot holds the last layer of the stage before, so
that it computes with the values of a real layer. It passes the carry on, and what it stacks is left out.

With V chunks of layers a stage, K is L / (N V), rounded up, and chunks take the place of stages above. What differs
between chunks is an array `[V, N, K, ...]`; weights, which are read layer by layer, are `[V K, N, ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard import _compat
from autoshard.spmdrules.families.stacked.stages import (
    collect_layers,
    layers_of_slots,
    own_layers,
    read_layer,
    spread_layers,
    stack_layers,
    unstack_layers,
)


class StageStacks:
    """Splits stacks of layers into stages.

    Args:
        layers: L, the number of layers.
        stages: N, the number of stages.
        chunks: V, the number of chunks of layers of each stage. N V is at most L.
    """

    def __init__(self, layers: int, stages: int, chunks: int = 1):
        self.layers, self.stages, self.chunks = layers, stages, chunks
        self.slots = -(-layers // (stages * chunks))
        self.even = layers % (stages * chunks) == 0
        self.contiguous = self.even and chunks == 1  # a stack is reshaped; otherwise the stages exchange layers

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape `[N, K, ...]` of a stack `[L, ...]` on stages, for one chunk of each."""
        return (self.stages, self.slots, *shape[1:])

    def shape_of_sums(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the sums of a stack `[L, ...]`: `[N, K, ...]`, or `[V, N, K, ...]`."""
        return (*([self.chunks] if self.chunks > 1 else []), *self.shape(shape))

    def spread(self, stack: Any) -> Any:
        """Return a stack `[L, ...]` on stages, `[N, K, ...]`, or `[V K, N, ...]`."""
        if self.contiguous:
            return stack.reshape(self.shape(stack.shape))
        return self._by_layer(spread_layers(stack, self.stages, self.chunks))

    def collect(self, x: Any) -> Any:
        """Return the stack `[L, ...]` of an array on stages, `[N, K, ...]` or `[V, N, K, ...]`."""
        if self.contiguous:
            return x.reshape(self.layers, *x.shape[2:])
        return collect_layers(x if self.chunks == 1 else jnp.swapaxes(x, 0, 1), self.layers, self.chunks)

    def spread_separate(self, layers: Sequence[Any]) -> Any:
        """Return L arrays `[...]` on stages, see `spread`. Some layers are in two slots if they do not divide."""
        slots = layers_of_slots(self.layers, self.stages, self.chunks)
        stack = stack_layers(*(layers[n] for n in slots.ravel()))
        return self._by_layer(stack.reshape(*slots.shape, *stack.shape[1:]))

    def collect_separate(self, x: Any) -> list[Any]:
        """Return the L arrays `[...]` of an array on stages, `[N, K, ...]` or `[V, N, K, ...]`."""
        if self.chunks > 1:
            x = jnp.swapaxes(x, 0, 1)
        of_layer = x.shape[2 if self.chunks == 1 else 3 :]
        of_slots = unstack_layers(x.reshape(self.stages * self.chunks * self.slots, *of_layer))
        layers = layers_of_slots(self.layers, self.stages, self.chunks).ravel().tolist()
        own = own_layers(self.layers, self.stages, self.chunks).ravel().tolist()
        found = {n: layer for n, is_own, layer in zip(layers, own, of_slots, strict=True) if is_own}
        return [found[n] for n in range(self.layers)]

    def own_slots(self) -> list[Any]:
        """Return whether a slot has a layer of its stage or chunk, see `spread`; nothing if all slots have one."""
        if self.even:
            return []
        return [jnp.asarray(self._by_layer(own_layers(self.layers, self.stages, self.chunks)))]

    def _by_layer(self, x: Any) -> Any:
        """Return `[N, K, ...]` as it is, and `[N, V, K, ...]` as `[V K, N, ...]`."""
        if self.chunks == 1:
            return x
        by_layer = x.swapaxes(0, 1).swapaxes(1, 2)
        return by_layer.reshape(self.chunks * self.slots, self.stages, *x.shape[3:])

    def layer(self, stack: Any, chunk: Any, number: Any) -> Any:
        """Return a layer of each stage's chunk, `[N, ...]`.

        Args:
            stack: the layers, `[V K, N, ...]`.
            chunk: the chunk of each stage, `[N]`. A negative one means the first.
            number: the number of the layer in its chunk.
        """
        index = jnp.maximum(chunk, 0) * self.slots + number
        if not _compat.is_extended(stack.dtype):
            return read_layer(stack, index)
        data = read_layer(jax.random.key_data(stack), index)  # random keys
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(stack))

    def carried(self, own: Sequence[Any], new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """Return the carry after a slot: the new one, or the old one if the slot has no layer of its stage.

        Args:
            own: whether the slot has one; nothing if all slots have one.
            new: the carry that the slot computes.
            old: the carry before it.
        """
        return [jnp.where(own[0], a, b) for a, b in zip(new, old, strict=True)] if own else [*new]
