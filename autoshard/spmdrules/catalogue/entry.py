"""A named operator: a callable, sample arguments, and the arguments with respect to which it is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class Operator:
    """A named operator. Its rule is derived from its primitives.

    Attributes:
        name: its common name, such as `layer_norm`.
        fn: a function that takes arrays by position and returns an array or a pytree of arrays.
        args: sample arguments: arrays where values matter (indices, keys), else `ShapeDtypeStruct`s. Dimensions that
            can be sharded are divisible by 4, and two unrelated dimensions never have the same size.
        wrt: positions of the arguments with respect to which it is differentiated; empty if it has no gradient.
        note: what is special about it, or why it has no gradient.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    wrt: tuple[int, ...] = (0,)
    note: str = ""

    @property
    def gradient(self) -> Operator | None:
        """The vector-Jacobian product. It takes the arguments, then cotangents of the floating-point results."""
        if not self.wrt:
            return None
        floats = _floats(jax.eval_shape(self.fn, *self.args))
        return Operator(f"{self.name}_grad", self._vjp, (*self.args, *floats), (), f"the gradient of {self.name}")

    @property
    def forward_derivative(self) -> Operator | None:
        """The Jacobian-vector product. It takes the arguments, then tangents of the arguments at `wrt`."""
        if not self.wrt:
            return None
        primals = [self.args[i] for i in self.wrt]
        tangents = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), primals)
        return Operator(f"{self.name}_jvp", self._jvp, (*self.args, *tangents), (), f"the tangents of {self.name}")

    def _vjp(self, *inputs: Any) -> tuple[Any, ...]:
        args, cotangents = inputs[: len(self.args)], inputs[len(self.args) :]
        return jax.vjp(*self._differentiable(args))[1](list(cotangents))

    def _jvp(self, *inputs: Any) -> list[Any]:
        args, tangents = inputs[: len(self.args)], inputs[len(self.args) :]
        fn, *primals = self._differentiable(args)
        return jax.jvp(fn, tuple(primals), tangents)[1]

    def _differentiable(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns a function from the arguments at `wrt` to the floating-point results, then these arguments."""

        def floats(*chosen: Any) -> list[Any]:
            full = list(args)
            for position, x in zip(self.wrt, chosen, strict=True):
                full[position] = x
            return _floats(self.fn(*full))

        return floats, *(args[i] for i in self.wrt)


def _floats(results: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """A float32 sample argument of this shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
