"""Small kernels in loops on an attached GPU: the time of a launch, of products by size, and of copies by size.

All kernels of a case run in one program, so the time of calling a program does not count. The compiler knows the number
of iterations of a loop of fixed length. In a loop with a condition on the device, such as the loop over tiles of the
experts, the host reads the condition in each iteration. `LOOP_WAIT_US` and `GRAPH_LAUNCH_US` come from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpu_timing import Figure, compiled_together, seconds_of
from jax import lax

from autoshard.sharding.machines.targets import Target

ITERATIONS = 100
TINY = 64  # rows and columns of a product that takes no longer than its launch
LAUNCHED = (1, 4)  # products of an iteration
SQUARES = [2**n for n in range(6, 14)]
TILES = [(512, 1024, 3584), (1024, 1024, 3584), (1024, 4096, 14336)]  # products of a tile of rows, there and back
MEBIBYTES = [2**n for n in range(0, 11, 2)]  # of an array that is read and written


def figures(target: Target, *, small: bool = False) -> Iterator[Figure]:
    """Measure everything, after all programs are compiled together."""
    found = {case: _lowered(*case) for case in _cases(small)}
    for (kind, *sizes), program in compiled_together({case: lowered for case, (lowered, _) in found.items()}).items():
        operands = [_random(x, n) for n, x in enumerate(found[(kind, *sizes)][1])]
        taken = seconds_of(lambda program=program, operands=operands: program(*operands, jnp.int32(ITERATIONS)))
        seconds = taken.median / ITERATIONS
        name = _name(kind, *sizes)
        if kind == "copy":
            yield Figure("loops", name, "rate", "GB/s", 2 * sizes[0] * 2**20 / seconds / 1e9, taken.spread)
        elif kind in ("product", "tile"):
            flops = 2.0 * sizes[0] * sizes[1] * sizes[2] * (2 if kind == "tile" else 1)
            yield Figure("loops", name, "rate", "TFLOP/s", flops / seconds / 1e12, taken.spread)
        else:
            yield Figure("loops", name, "time", "us", seconds * 1e6, taken.spread)


def _cases(small: bool) -> list[tuple[Any, ...]]:
    """Return the kind of each case, and its sizes."""
    cases: list[tuple[Any, ...]] = [(kind, n) for kind in ("fixed", "condition") for n in LAUNCHED]
    cases += [("product", n, n, n) for n in SQUARES[: 2 if small else None]]
    cases += [("tile", *sizes) for sizes in ([(16, 32, 48)] if small else TILES)]
    return cases + [("copy", size) for size in MEBIBYTES[: 1 if small else None]]


def _name(kind: str, *sizes: int) -> str:
    if kind in ("fixed", "condition"):
        loop = "a loop of fixed length" if kind == "fixed" else "a loop with a condition on the device"
        return f"iteration of {loop}, products of {TINY} x {TINY} x {TINY}: {sizes[0]}"
    if kind == "copy":
        return f"memory in a loop: {sizes[0]} MiB"
    return f"{'two products' if kind == 'tile' else 'product'} in a loop: {' x '.join(map(str, sizes))}"


def _lowered(kind: str, *sizes: int) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Return the lowered loop, and the shapes of its operands without the number of iterations."""
    if kind == "copy":
        shapes, dtype, products = [(sizes[0] * 2**18,)], jnp.float32, 0
    elif kind == "tile":
        m, k, n = sizes
        shapes, dtype, products = [(m, k), (k, n), (n, k)], jnp.bfloat16, 1
    else:
        n = sizes[0] if kind == "product" else TINY
        shapes, dtype, products = [(n, n), (n, n)], jnp.bfloat16, 1 if kind == "product" else sizes[0]

    def body(x: Any, others: Sequence[Any]) -> Any:
        if not others:
            return x * 1.001
        for w in [*others] * products:
            x = x @ w
        return x

    def run(*operands: Any) -> Any:
        x, *others, count = operands
        return lax.fori_loop(0, count if kind == "condition" else ITERATIONS, lambda _, x: body(x, others), x)

    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(run).lower(*given, jax.ShapeDtypeStruct((), jnp.int32)), given


def _random(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Return random values; products with such matrices keep the size of values."""
    inner = shape.shape[0] if seed else 1
    return jax.jit(lambda: (jax.random.normal(jax.random.key(seed), shape.shape) / inner**0.5).astype(shape.dtype))()
