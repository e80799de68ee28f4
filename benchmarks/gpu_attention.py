"""Attention on an attached GPU, and the planner's times of it: cuDNN's kernel, plain, and blockwise.

A batch has 16,384 positions of 16 heads at each length, so the work outside attention's scores stays the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gpu_timing import Figure, Predictions, compiled_together, seconds_of

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.models.attention import attention
from autoshard.sharding.machines.targets import Target

POSITIONS, HEADS = 16384, 16
LONGEST_PLAIN = 4096  # float32 scores of 16 heads, and their gradients, fit a device up to here


class Case(NamedTuple):
    """One call of attention."""

    way: Any
    length: int
    head_dim: int
    causal: bool
    gradients: bool
    positions: int = POSITIONS

    def __str__(self) -> str:
        passes = "forward and backward" if self.gradients else "forward"
        mask = "causal" if self.causal else "full"
        return f"{self.way}, {passes}: {self.length} positions, heads of {self.head_dim}, {mask}"

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of queries, keys, values and the cotangent."""
        shape = (self.positions // self.length, self.length, HEADS, self.head_dim)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 4

    def function(self) -> Callable[..., Any]:
        """The function of these operands."""

        def forward(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            return attention(q, k, v, causal=self.causal, impl=self.way)

        def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            out, pullback = jax.vjp(lambda *x: attention(*x, causal=self.causal, impl=self.way), q, k, v)
            return out, *pullback(cotangent)

        return both if self.gradients else forward


CASES = [
    Case(way, length, head_dim, causal, gradients)
    for length, head_dim, causal in [(2**n, 128, True) for n in range(10, 15)] + [(8192, 128, False), (4096, 64, True)]
    for way in ("cudnn", "plain", "blockwise")
    if way != "plain" or length <= LONGEST_PLAIN
    for gradients in (False, True)
]
SMALL = [Case(way, 1024, 64, True, True, 1024) for way in ("cudnn", "plain")]


def figures(target: Target, *, small: bool = False) -> Iterator[Figure]:
    """Time the forward pass, and it together with the gradients, for each case and implementation."""
    lowered = {case: jax.jit(case.function()).lower(*case.shapes()) for case in (SMALL if small else CASES)}
    for case, program in compiled_together(lowered).items():
        operands = [_random(shape, n) for n, shape in enumerate(case.shapes())]
        found = seconds_of(lambda program=program, operands=operands: program(*operands))
        yield Figure("attention", str(case), "time", "ms", 1e3 * found.median, found.spread)


def predictions(target: Target) -> Predictions:
    """Return the times of plans with one device, in milliseconds."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        for case in CASES:
            made = plan(case.function(), *case.shapes(), target=target.name, plan="dp:1")
            found[str(case), "time"] = made.estimate.step_time_us / 1e3
    return found


def _random(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape.shape, shape.dtype))()
