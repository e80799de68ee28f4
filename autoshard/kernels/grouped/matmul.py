"""Products of groups of consecutive rows, each with its own matrix, as operators that a plan shards.

    product   m k, v k n, w, v, m -> m n; reduce k v
    of rows   m n, v k n, w, v, m -> m k; reduce n v
    of matrices  m k, m n, w, v, m -> v k n; reduce m

`m` are rows, `v` groups, `w` the sizes of all groups, which every device has. Two operands say which part a shard has:
the numbers of its groups, sharded like the matrices, and the positions of its rows, sharded like the rows. A shard
computes its rows of its own groups and has zeros elsewhere, so the sum over shards of groups is the product.

On TPUs the kernels are JAX's megablox (`_compat.megablox`), on NVIDIA GPUs those of `triton`. Elsewhere the operators
run in plain JAX (`tiled`).

Source: MegaBlocks (arXiv:2211.15841).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard._compat import megablox
from autoshard.kernels.grouped.call import GroupedCall, grouped_call
from autoshard.kernels.grouped.cost import (
    gradient_cost,
    gradient_kernel_cost,
    product_cost,
    product_kernel_cost,
    shape_of,
    triton_gradient_cost,
    triton_product_cost,
)
from autoshard.kernels.grouped.tiled import tiled_gradient, tiled_product
from autoshard.kernels.grouped.tiles import gradient_tiles, padded_rows, product_tiles, tiled_rows
from autoshard.kernels.grouped.triton import gradient_blocks, product_blocks, triton_gradient, triton_product
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from autoshard.spmdrules.custom_ops.opaque_primitive import drawing_operands, stating_results
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.families.grouped_matmul import drawn_group_sizes


def grouped_matmul(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiply groups of consecutive rows, each with its own matrix.

    Group g has the next `group_sizes[g]` rows, from the first row on. The result is that of `jax.lax.ragged_dot`, but
    rows after the last group are zeros on all platforms. Plans shard it over rows, groups, and both dimensions of the
    matrices. The estimate of a plan assumes groups of equal sizes.

    Programs that are planned for a TPU use JAX's megablox kernels. Those for an NVIDIA GPU use Triton kernels, if the
    dtype has 16 bits and 16 divides `k` and `n`. There is no second derivative and no forward-mode derivative.

    Args:
        rows: `[m, k]`, in bfloat16 or float32 for the kernels; other floating types run in plain JAX.
        weights: `[groups, k, n]`, in the dtype of `rows`.
        group_sizes: integers `[groups]`, not negative. If their sum exceeds `m`, the last groups have fewer rows.

    Returns:
        `[m, n]` in the dtype of `rows`.

    Raises:
        ValueError: If the shapes do not match, or the dtypes are not as above.

    >>> rows, weights = jnp.ones((4, 2)), jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
    >>> grouped_matmul(rows, weights, jnp.array([1, 2])).tolist()
    [[1.0, 1.0], [3.0, 3.0], [3.0, 3.0], [0.0, 0.0]]
    """
    _check(rows, weights, group_sizes)
    own = lax.iota(jnp.int32, weights.shape[0])
    return grouped_product(grouped_call(rows.dtype), rows, weights, group_sizes.astype(jnp.int32), own)


def grouped_product(
    call: GroupedCall, rows: jax.Array, weights: jax.Array, sizes: jax.Array, own: jax.Array
) -> jax.Array:
    """Compute `grouped_matmul` for the groups with numbers `own`; zeros in rows of other groups.

    Args:
        call: the static part.
        rows: `[m, k]`.
        weights: `[own groups, k, n]`.
        sizes: rows of all groups, int32 `[groups]`.
        own: consecutive numbers of groups, int32 `[own groups]`.
    """
    return _product(call, rows, weights, sizes, own, lax.iota(jnp.int32, rows.shape[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: GroupedCall, rows, weights, sizes, own, positions) -> jax.Array:
    return grouped_rows(rows, weights, sizes, own, positions, call=call)


def _product_forward(call: GroupedCall, *operands):
    return _product(call, *operands), operands


def _product_backward(call: GroupedCall, operands, d_out):
    rows, weights, *groups = operands
    d_rows = grouped_rows_gradient(d_out, weights, *groups, call=replace(call, transposed=True))
    return d_rows, grouped_weights_gradient(rows, d_out, *groups, call=call).astype(weights.dtype), None, None, None


_product.defvjp(_product_forward, _product_backward)


def _product_types(rows: Any, weights: Any, *groups: Any, call: GroupedCall) -> list[Any]:
    return [jax.ShapeDtypeStruct((rows.shape[0], weights.shape[1 if call.transposed else 2]), rows.dtype)]


def _gradient_types(rows: Any, d_out: Any, sizes: Any, own: Any, positions: Any, *, call: GroupedCall) -> list[Any]:
    return [jax.ShapeDtypeStruct((own.shape[0], rows.shape[1], d_out.shape[1]), rows.dtype)]


def _draw(rng: np.random.Generator, rows: Any, other: Any, sizes: Any, own: Any, positions: Any) -> dict[int, Any]:
    """Draw valid sizes of groups, consecutive numbers of groups, and the positions of all rows."""
    first = rng.integers(0, sizes.shape[0] - own.shape[0] + 1)
    own_groups = np.arange(first, first + own.shape[0], dtype=np.int32)
    return {
        2: drawn_group_sizes(rng, sizes.shape, rows.shape[0]),
        3: own_groups,
        4: np.arange(rows.shape[0], dtype=np.int32),
    }


@operator("m k, v k n, w, v, m -> m n; reduce k v; whole w; linear 0; linear 1", cost=product_cost)
@stating_results(_product_types)
@drawing_operands(_draw)
def grouped_rows(rows, weights, sizes, own, positions, *, call: GroupedCall) -> jax.Array:
    """Multiply the rows of the groups `own` by their matrices."""
    return _rows(call, rows, weights, sizes, own, positions)


@operator("m n, v k n, w, v, m -> m k; reduce n v; whole w; linear 0; linear 1", cost=product_cost)
@stating_results(_product_types)
@drawing_operands(_draw)
def grouped_rows_gradient(d_out, weights, sizes, own, positions, *, call: GroupedCall) -> jax.Array:
    """Multiply the cotangents of the groups `own` by their transposed matrices."""
    return _rows(call, d_out, weights, sizes, own, positions)


@operator("m k, m n, w, v, m -> v k n; reduce m; whole w; linear 0; linear 1", cost=gradient_cost)
@stating_results(_gradient_types)
@drawing_operands(_draw)
def grouped_weights_gradient(rows, d_out, sizes, own, positions, *, call: GroupedCall) -> jax.Array:
    """Compute the gradients of the matrices of the groups `own`."""
    return _matrices(call, rows, d_out, sizes, own, positions)


@functools.partial(jax.jit, static_argnums=0)
def _rows(call: GroupedCall, rows, weights, sizes, own, positions):
    count, columns = rows.shape[0], weights.shape[1 if call.transposed else 2]
    if not count:
        return jnp.zeros((count, columns), rows.dtype)
    starts, ends = group_bounds(sizes, positions)

    def plain(rows, weights, starts, ends, own):
        tile = tiled_rows(count, sizes.shape[0])
        return tiled_product(rows, weights, starts[own], ends[own], tile=tile, transposed=call.transposed)

    def on_gpus(rows, weights, starts, ends, own):
        shape = shape_of(rows, columns, sizes, own)
        blocks = product_blocks(shape.inner, shape.columns)
        if blocks is None:
            return plain(rows, weights, starts, ends, own)
        return triton_product(
            rows, weights, starts[own], ends[own], transposed=call.transposed, blocks=blocks,
            cost=triton_product_cost(shape, blocks), interpret=call.interpret,
        )  # fmt: skip

    def on_tpus(rows, weights, starts, ends, own):
        shape = shape_of(rows, columns, sizes, own)
        tiles = product_tiles(shape, count, call.vector_memory_bytes)
        found = megablox.product(
            _padded(rows), weights, ends - starts, own[0], transposed=call.transposed, tiles=tiles,
            stated=_stated(product_kernel_cost(shape, tiles)), vector_memory_bytes=call.vector_memory_bytes,
            interpret=call.interpret,
        )[:count]  # fmt: skip
        row = lax.broadcasted_iota(jnp.int32, (count, 1), 0)
        return jnp.where((row >= starts[own[0]]) & (row < ends[own[-1]]), found, 0)  # others were not computed

    return _by_platform(call, on_tpus, on_gpus, plain, rows, weights, starts, ends, own)


@functools.partial(jax.jit, static_argnums=0)
def _matrices(call: GroupedCall, rows, d_out, sizes, own, positions):
    count = rows.shape[0]
    if not count:
        return jnp.zeros((own.shape[0], rows.shape[1], d_out.shape[1]), rows.dtype)
    starts, ends = group_bounds(sizes, positions)

    def plain(rows, d_out, starts, ends, own):
        tile = tiled_rows(count, sizes.shape[0])
        return tiled_gradient(rows, d_out, starts[own], ends[own], tile=tile, dtype=rows.dtype)

    def on_gpus(rows, d_out, starts, ends, own):
        shape = shape_of(rows, d_out.shape[1], sizes, own)
        blocks = gradient_blocks(shape.inner, shape.columns)
        if blocks is None:
            return plain(rows, d_out, starts, ends, own)
        cost = triton_gradient_cost(shape, blocks)
        return triton_gradient(rows, d_out, starts[own], ends[own], blocks=blocks, cost=cost, interpret=call.interpret)

    def on_tpus(rows, d_out, starts, ends, own):
        shape = shape_of(rows, d_out.shape[1], sizes, own)
        tiles = gradient_tiles(shape, count, call.vector_memory_bytes)
        return megablox.weight_gradient(
            _padded(rows), _padded(d_out), ends - starts, own[0], groups=own.shape[0], dtype=rows.dtype,
            tiles=tiles, stated=_stated(gradient_kernel_cost(shape, tiles)),
            vector_memory_bytes=call.vector_memory_bytes, interpret=call.interpret,
        )  # fmt: skip

    return _by_platform(call, on_tpus, on_gpus, plain, rows, d_out, starts, ends, own)


def _by_platform(call: GroupedCall, on_tpus: Any, on_gpus: Any, plain: Any, *args: Any) -> Any:
    """Run the call's kernel on the platform that it is for, and the same computation in plain JAX elsewhere."""
    if call.kernel == "tiled":
        return plain(*args)
    platform, kernel = ("tpu", on_tpus) if call.kernel == "megablox" else ("cuda", on_gpus)
    return kernel(*args) if call.interpret else lax.platform_dependent(*args, default=plain, **{platform: kernel})


def group_bounds(sizes: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first row of each group on this shard, and the row after its last one; equal if it has none here."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    first, last = (jnp.clip(edge - positions[0], 0, positions.shape[0]) for edge in (ends - sizes, ends))
    return first, last


def _padded(x: jax.Array) -> jax.Array:
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def _stated(cost: KernelCost) -> tuple[float, float, float]:
    """Return what a kernel states to the compiler. It has no transcendental operations."""
    return cost.flops, 0.0, cost.moved_bytes


def _check(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> None:
    problems = []
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[1]:
        problems.append("rows must be [m, k] and weights [groups, k, n] with the same k; transpose or reshape them")
    elif group_sizes.shape != weights.shape[:1]:
        problems.append(f"group_sizes has shape {group_sizes.shape}; it must be {weights.shape[:1]}, one size a group")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        problems.append(f"group_sizes is {group_sizes.dtype}; it must be an integer type")
    if rows.dtype != weights.dtype or not jnp.issubdtype(rows.dtype, jnp.floating):
        problems.append(
            f"rows are {rows.dtype} and weights {weights.dtype}; they must be of one floating type; cast one"
        )
    if problems:
        raise ValueError(f"grouped_matmul(rows {rows.shape}, weights {weights.shape}): {'; '.join(problems)}")
