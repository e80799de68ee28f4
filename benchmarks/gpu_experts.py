"""Products of experts on an attached GPU in several forms, and the times that the planner predicts.

A form computes the product of rows and the matrices of their experts, the gradient of the rows, and the gradient of the
matrices. Rows choose experts at random, so groups have different sizes. The forms:

    Triton      the kernels of `autoshard.kernels.grouped`, also with other blocks
    tiles       a loop over tiles of rows in plain JAX
    ragged_dot  XLA's own: one masked product of all rows for each expert
    Mosaic      an example of JAX for Hopper (`pallas.ops.gpu`)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Figure, Predictions, compiled_together, seconds_of

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.matmul import grouped_product
from autoshard.kernels.grouped.triton import Blocks, triton_gradient, triton_product
from autoshard.sharding.machines.targets import Target
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

PASSES = ("product", "gradient of rows", "gradient of matrices")
Form = Mapping[str, Callable[..., jax.Array]]
"""A pass -> its function of rows, matrices, the cotangent and the sizes of groups."""


class Shape(NamedTuple):
    """Rows, elements of a row, columns and experts of a product."""

    rows: int
    inner: int
    columns: int
    experts: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.experts} experts of {self.inner} x {self.columns}"

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of rows, matrices, the cotangent and the sizes of groups."""
        shapes = (self.rows, self.inner), (self.experts, self.inner, self.columns), (self.rows, self.columns)
        return [*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
                jax.ShapeDtypeStruct((self.experts,), jnp.int32)]  # fmt: skip

    def sizes(self) -> jax.Array:
        """Return the number of rows that chose each expert."""
        chosen = np.random.default_rng(0).integers(0, self.experts, self.rows)
        return jnp.asarray(np.bincount(chosen, minlength=self.experts), jnp.int32)


def _differentiated(product: Callable[..., jax.Array]) -> Form:
    """Return the passes of a product of rows, matrices and sizes that can be differentiated."""

    def of_rows(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return jax.vjp(lambda rows: product(rows, weights, sizes), rows)[1](d_out)[0]

    def of_matrices(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return jax.vjp(lambda weights: product(rows, weights, sizes), weights)[1](d_out)[0]

    functions = (lambda rows, weights, d_out, sizes: product(rows, weights, sizes)), of_rows, of_matrices
    return dict(zip(PASSES, functions, strict=True))


def _grouped(call: GroupedCall) -> Form:
    def product(rows: Any, weights: Any, sizes: Any) -> Any:
        return grouped_product(call, rows, weights, sizes, jnp.arange(weights.shape[0], dtype=jnp.int32))

    return _differentiated(product)


def _triton(blocks: Blocks) -> Form:
    """Return the passes of the Triton kernels with these blocks."""
    unpriced = KernelCost(0.0, 2, 0.0)  # only audits read the cost

    def bounds(sizes: Any) -> tuple[Any, Any]:
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        return ends - sizes, ends

    def product(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return triton_product(
            rows, weights, *bounds(sizes), transposed=False, blocks=blocks, cost=unpriced, interpret=False
        )

    def of_rows(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return triton_product(
            d_out, weights, *bounds(sizes), transposed=True, blocks=blocks, cost=unpriced, interpret=False
        )

    def of_matrices(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return triton_gradient(rows, d_out, *bounds(sizes), blocks=blocks, cost=unpriced, interpret=False)

    return dict(zip(PASSES, (product, of_rows, of_matrices), strict=True))


def _mosaic() -> Form:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    options: dict[str, Any] = {
        "block_m": 128,
        "block_n": 128,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 8,
    }

    def product(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return ragged_dot(rows, weights, group_sizes=sizes, **options)

    def of_rows(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return ragged_dot(d_out, weights, group_sizes=sizes, transpose_rhs=True, **options)

    def of_matrices(rows: Any, weights: Any, d_out: Any, sizes: Any) -> Any:
        return transposed_ragged_dot(rows, d_out, group_sizes=sizes, **options)

    return dict(zip(PASSES, (product, of_rows, of_matrices), strict=True))


CALLS = {"Triton": GroupedCall("triton"), "tiles": GroupedCall("tiled", launches=True)}
# Other blocks, which are chosen around those of `kernels.constants`.
BLOCKS = [
    Blocks(128, 128, 64, 4, 3), Blocks(128, 128, 64, 4, 4), Blocks(128, 128, 64, 8, 3), Blocks(128, 128, 64, 8, 4),
    Blocks(128, 256, 64, 8, 4), Blocks(256, 128, 64, 8, 3), Blocks(64, 256, 64, 4, 4), Blocks(128, 128, 32, 4, 4),
]  # fmt: skip
# Chosen. The experts of the second are those of Mixtral 8x7B (table 1 of arXiv:2401.04088).
SHAPES = [Shape(32768, 1024, 3584, 8), Shape(16384, 4096, 14336, 8), Shape(32768, 2048, 768, 64)]
SMALL = Shape(512, 64, 128, 4)


def cases(small: bool) -> dict[tuple[str, Shape, str], Callable[..., jax.Array]]:
    """Return the functions by form, shape and pass. Other blocks are tried at the first shape."""
    shapes = [SMALL] if small else SHAPES
    forms = {name: _grouped(call) for name, call in CALLS.items()} | {"ragged_dot": _differentiated(jax.lax.ragged_dot)}
    others = {}
    if jax.default_backend() == "gpu":
        forms["Mosaic"] = _mosaic()
        others = {_named(blocks): _triton(blocks) for blocks in BLOCKS}
    return {
        (name, shape, each): fn for shape in shapes for name, form in forms.items() for each, fn in form.items()
    } | {(name, shapes[0], each): fn for name, form in others.items() for each, fn in form.items()}


def figures(target: Target, *, small: bool = False, only: str = "") -> Iterator[Figure]:
    """Time each pass of each form with `only` in its name."""
    found = {key: fn for key, fn in cases(small).items() if only in _case(*key)}
    lowered = {key: jax.jit(fn).lower(*key[1].operands()) for key, fn in found.items()}
    compiled = compiled_together(lowered)
    for shape in dict.fromkeys(shape for _, shape, _ in compiled):
        operands = [_random(x, n) for n, x in enumerate(shape.operands()[:3])] + [shape.sizes()]
        flops = 2.0 * shape.rows * shape.inner * shape.columns
        for (name, of, each), program in compiled.items():
            if of == shape:
                try:
                    taken = seconds_of(lambda program=program, operands=operands: program(*operands))
                except jax.errors.JaxRuntimeError as error:  # such as: out of memory
                    print(f"{_case(name, shape, each)}: {str(error).splitlines()[0][:200]}", flush=True)
                    continue
                note = f"{flops / taken.median / 1e12:.0f} TFLOP/s"
                yield Figure("experts", _case(name, shape, each), "time", "ms", 1e3 * taken.median, taken.spread, note)


def predictions(target: Target) -> Predictions:
    """Return the times of plans with one device, in milliseconds."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        for shape in SHAPES:
            forms = {name: _grouped(call) for name, call in CALLS.items()}
            for name, form in (forms | {"ragged_dot": _differentiated(jax.lax.ragged_dot)}).items():
                for each, fn in form.items():
                    made = plan(fn, *shape.operands(), target=target.name, plan="dp:1", kernels="off")
                    found[_case(name, shape, each), "time"] = made.estimate.step_time_us / 1e3
    return found


def _named(blocks: Blocks) -> str:
    sizes = f"{blocks.rows} x {blocks.columns} x {blocks.contracted}"
    return f"Triton with blocks {sizes}, {blocks.warps} warps, {blocks.stages} loads"


def _case(name: str, shape: Shape, each: str) -> str:
    return f"{name}, {each}: {shape}"


def _random(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape.shape, shape.dtype))()
