"""What a named operator is: a callable, sample arguments, and what it is differentiated by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Operator:
    """An operator as people call it; its rule is derived from the primitives that it is made of.

    Attributes:
        name: what people call it, `layer_norm`.
        fn: takes arrays by position and returns an array or a tree of arrays.
        args: sample arguments: arrays where values matter (indices, keys), else `ShapeDtypeStruct`s. Dimensions that
            can be sharded are divisible by 4, and no two different ones have the same size.
        wrt: positions of the arguments that it is differentiated by, none where there is no gradient.
        note: what sets it apart, or why it has no gradient.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    wrt: tuple[int, ...] = (0,)
    note: str = ""

    @property
    def gradient(self) -> Operator | None:
        """The vector-Jacobian product: the arguments, then cotangents shaped like the floating-point results."""
        if not self.wrt:
            return None
        results = jax.eval_shape(self.fn, *self.args)
        floats = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return Operator(f"{self.name}_grad", self._vjp, (*self.args, *floats), (), f"the gradient of {self.name}")

    def _vjp(self, *given: Any) -> tuple[Any, ...]:
        args, cotangents = given[: len(self.args)], given[len(self.args) :]

        def floats(*chosen: Any) -> list[Any]:
            full = list(args)
            for position, x in zip(self.wrt, chosen, strict=True):
                full[position] = x
            return [x for x in jax.tree.leaves(self.fn(*full)) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.vjp(floats, *(args[i] for i in self.wrt))[1](list(cotangents))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A sample argument of floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
