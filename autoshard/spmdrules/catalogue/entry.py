"""What a named operator is: a callable, sample arguments, and what it is differentiated by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        floats = _floats(jax.eval_shape(self.fn, *self.args))
        return Operator(f"{self.name}_grad", self._vjp, (*self.args, *floats), (), f"the gradient of {self.name}")

    @property
    def forward(self) -> Operator | None:
        """The Jacobian-vector product: the arguments, then tangents of those that it is differentiated by."""
        if not self.wrt:
            return None
        kinds = [self.args[i] for i in self.wrt]
        tangents = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kinds)
        return Operator(f"{self.name}_jvp", self._jvp, (*self.args, *tangents), (), f"the tangents of {self.name}")

    def _vjp(self, *given: Any) -> tuple[Any, ...]:
        args, cotangents = given[: len(self.args)], given[len(self.args) :]
        return jax.vjp(*self._differentiable(args))[1](list(cotangents))

    def _jvp(self, *given: Any) -> list[Any]:
        args, tangents = given[: len(self.args)], given[len(self.args) :]
        fn, *primals = self._differentiable(args)
        return jax.jvp(fn, tuple(primals), tangents)[1]

    def _differentiable(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """A function from the arguments that it is differentiated by to its floating-point results, and those."""

        def floats(*chosen: Any) -> list[Any]:
            full = list(args)
            for position, x in zip(self.wrt, chosen, strict=True):
                full[position] = x
            return _floats(self.fn(*full))

        return floats, *(args[i] for i in self.wrt)


def _floats(results: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A sample argument of floats."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
