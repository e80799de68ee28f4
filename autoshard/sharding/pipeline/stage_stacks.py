"""Stacks of layers as arrays of stages: `[L, ...]` to `[N, K, ...]` and back, for L layers on N stages.

A stage has K slots for its layers. K is L / N, rounded up. If N does not divide L, the first stages have K layers, and
each of the others has a first slot without a layer of its own. Such a slot holds the last layer of the stage before, so
that it computes with the values of a real layer. It passes the carry on, and what it stacks is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from autoshard.spmdrules.families.stages import (
    collect_layers,
    layers_of_slots,
    own_layers,
    spread_layers,
    stack_layers,
    unstack_layers,
)


class StageStacks:
    """Splits stacks of layers into stages.

    Args:
        layers: L, the number of layers.
        stages: N, the number of stages, at most L.
    """

    def __init__(self, layers: int, stages: int):
        self.layers, self.stages = layers, stages
        self.slots = -(-layers // stages)
        self.even = layers % stages == 0

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape `[N, K, ...]` of a stack `[L, ...]` on stages."""
        return (self.stages, self.slots, *shape[1:])

    def spread(self, stack: Any) -> Any:
        """Return a stack `[L, ...]` on stages, `[N, K, ...]`."""
        return stack.reshape(self.shape(stack.shape)) if self.even else spread_layers(stack, self.stages)

    def collect(self, x: Any) -> Any:
        """Return the stack `[L, ...]` of an array on stages, `[N, K, ...]`."""
        return x.reshape(self.layers, *x.shape[2:]) if self.even else collect_layers(x, self.layers)

    def spread_separate(self, layers: Sequence[Any]) -> Any:
        """Return L arrays `[...]` on stages, `[N, K, ...]`. Some layers are in two slots if N does not divide L."""
        slots = layers_of_slots(self.layers, self.stages).ravel()
        stack = stack_layers(*(layers[n] for n in slots))
        return stack.reshape(self.shape(stack.shape))

    def collect_separate(self, x: Any) -> list[Any]:
        """Return the L arrays `[...]` of an array on stages, `[N, K, ...]`."""
        of_slots = unstack_layers(x.reshape(self.stages * self.slots, *x.shape[2:]))
        own = own_layers(self.layers, self.stages).ravel()
        return [layer for layer, is_own in zip(of_slots, own, strict=True) if is_own]

    def own_slots(self) -> list[Any]:
        """Return `[N, K]`, whether a slot has a layer of its stage; nothing if all slots have one."""
        return [] if self.even else [jnp.asarray(own_layers(self.layers, self.stages))]

    def carried(self, own: Sequence[Any], new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """Return the carry after a slot: the new one, or the old one if the slot has no layer of its stage.

        Args:
            own: whether the slot has one; nothing if all slots have one.
            new: the carry that the slot computes.
            old: the carry before it.
        """
        return [jnp.where(own[0], a, b) for a, b in zip(new, old, strict=True)] if own else [*new]
