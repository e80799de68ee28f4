"""Operators that take stacks of layers and use one layer of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class LayerStacks:
    """Operands that are stacks of layers, of which an operator uses one layer (`taking_stacks`).

    Attributes:
        factor: the factor of the rule that counts the layers. It is the first dimension of each stack.
        layer: the operand with the number of the layer, int32 `[1]`.
    """

    factor: str
    layer: int


def taking_stacks(factor: str, layer: int) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that says that some operands are stacks of layers, and the operator uses one layer of each.

    A loop over the layers then does not slice the stacks, such as those that a kernel reads in place. If a stack is
    resharded for the operator, a plan takes the slice of the layer before.

    Args:
        factor: the factor of the rule that counts the layers, the first dimension of each stack. It is whole.
        layer: the position of the operand with the number of the layer, int32 `[1]`.
    """

    def decorate(fn: Any) -> Any:
        fn.layer_stacks = LayerStacks(factor, layer)
        return fn

    return decorate


def layer_stacks(fn: Any) -> LayerStacks | None:
    """Returns which operands of an operator's function are stacks of layers; None for any other object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "layer_stacks", None)
