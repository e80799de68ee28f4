"""Grouped products with matrices in 4-bit codes, as operators that a plan shards.

    product   m (b d), l v (b d) n, v b n, 1, w, v, m -> m n; reduce b v
    of rows   m n, l v (b d) n, v b n, 1, w, v, m -> m (b d); reduce n v
    of all    t (b d), l v (b d) n, v b n, 1 -> v t n; reduce b

The letters are those of `grouped.matmul`, where the inputs `k` of a matrix are `b` blocks of `d` codes. The codes are
those of all layers `l`, and the operand behind the scales is the number of the layer: see `kernel`. Each output has
its own scale for a block. The matrices are frozen: they have no gradient. In the product of all, each group has a tile
of rows of its own, or all groups share one.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.kernels.constants import CODED_ROWS
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.codes.cost import CodedShape, coded_cost, coded_tiles, kernel_memory, layout_copy
from autoshard.kernels.grouped.codes.decoding import BLOCK
from autoshard.kernels.grouped.codes.kernel import Visits, coded_product, visits_of_all, visits_of_groups
from autoshard.kernels.grouped.matmul import group_bounds
from autoshard.kernels.grouped.tiled import tiled_product, with_whole_tiles
from autoshard.kernels.grouped.tiles import Tiles, tiled_rows
from autoshard.spmdrules.core.layer_stacks import taking_stacks
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from autoshard.spmdrules.custom_ops.opaque_primitive import drawing_operands, stating_results
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.families.grouped_matmul import drawn_group_sizes


def reads_codes(call: GroupedCall, dtype: Any, codes: Any, scale: Any, *, rows: int | None = None) -> bool:
    """Return whether a kernel multiplies rows by these codes without a decoded copy of the matrices.

    Args:
        call: the implementation of grouped products. TPUs have the kernel.
        dtype: the dtype of the rows.
        codes: `[layers, groups, k, n]`; anything with a shape and a dtype.
        scale: `[groups, blocks, n]`.
        rows: the number of rows, if each group has a tile of all of them (`coded_product_of_all`).
    """
    return call.kernel == "megablox" and not kernel_problem(call, dtype, codes, scale, rows=rows)


def kernel_problem(call: GroupedCall, dtype: Any, codes: Any, scale: Any, *, rows: int | None = None) -> str:
    """Return why the kernel for TPUs cannot read these codes; empty if it can. The arguments are as above."""
    if dtype != jnp.bfloat16:
        return f"it takes rows in bfloat16, not {jnp.dtype(dtype).name}"
    if codes.dtype != jnp.float4_e2m1fn or scale.dtype != jnp.float8_e8m0fnu:
        return f"it reads float4_e2m1fn codes with float8_e8m0fnu scales, not {codes.dtype} with {scale.dtype}"
    _, groups, inner, columns = codes.shape
    if inner % BLOCK or scale.shape != (groups, inner // BLOCK, columns):
        return f"each output needs a scale for {BLOCK} inputs; codes are {codes.shape} and scales {scale.shape}"
    shapes = [
        CodedShape(CODED_ROWS, inner, columns, groups, "sorted"),
        CodedShape(CODED_ROWS, columns, inner, groups, "sorted", transposed=True),
    ]
    if rows is not None:
        shapes = [CodedShape(rows, inner, columns, groups, "own")]
    if any(coded_tiles(one, call.vector_memory_bytes) is None for one in shapes):
        return (
            f"no tile of matrices {inner} x {columns} fits {call.vector_memory_bytes / 2**20:.0f} MiB of vector memory"
        )
    return ""


def coded_grouped_product(
    call: GroupedCall, rows: jax.Array, codes: jax.Array, scale: jax.Array, layer: jax.Array, sizes: jax.Array,
    own: jax.Array,
) -> jax.Array:  # fmt: skip
    """Compute `grouped_product` with matrices in codes, in the dtype of the rows. `reads_codes` must hold.

    Args:
        call: the static part.
        rows: bfloat16 `[m, k]`.
        codes: float4_e2m1fn `[layers, own groups, k, n]`.
        scale: those of the layer, float8_e8m0fnu `[own groups, k / 32, n]`.
        layer: the number of the layer, int32 `[1]`.
        sizes: rows of all groups, int32 `[groups]`.
        own: consecutive numbers of groups, int32 `[own groups]`.
    """
    return _product(call, rows, codes, scale, layer, sizes, own, lax.iota(jnp.int32, rows.shape[0]))


def coded_product_of_all(
    call: GroupedCall, rows: jax.Array, codes: jax.Array, scale: jax.Array, layer: jax.Array
) -> jax.Array:
    """Multiply the same rows `[t, k]`, or those of each group `[groups, t, k]`, by all matrices: `[groups, t, n]`.

    The other arguments are those of `coded_grouped_product`. There is no derivative.
    """
    return (coded_shared_rows if rows.ndim == 2 else coded_own_rows)(rows, codes, scale, layer, call=call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: GroupedCall, rows, codes, scale, layer, sizes, own, positions) -> jax.Array:
    return coded_rows(rows, codes, scale, layer, sizes, own, positions, call=call)


def _product_forward(call: GroupedCall, *operands):
    return _product(call, *operands), operands[1:]


def _product_backward(call: GroupedCall, operands, d_out):
    d_rows = coded_rows_gradient(d_out, *operands, call=replace(call, transposed=True))
    return d_rows, *(None for _ in operands)


_product.defvjp(_product_forward, _product_backward)


def _shape_of(rows: Any, codes: Any, sizes: Any, call: GroupedCall) -> CodedShape:
    """Return the shape of a product of sorted rows on one device, with its part of the rows."""
    (count, inner), (_, groups, inputs, outputs) = rows.shape, codes.shape
    columns = inputs if call.transposed else outputs
    return CodedShape(count * groups / sizes.shape[0], inner, columns, groups, "sorted", call.transposed)


def _of_all_shape(rows: Any, codes: Any) -> CodedShape:
    form = "shared" if len(rows.shape) == 2 else "own"
    return CodedShape(rows.shape[-2], rows.shape[-1], codes.shape[-1], codes.shape[1], form)


def _cost(shape: CodedShape, call: GroupedCall, codes: Any) -> tuple[KernelCost, ...]:
    copy = layout_copy(*codes.shape[1:])
    return coded_cost(shape, _tiles(shape, call)), *(() if copy is None else (copy,))


def _tiles(shape: CodedShape, call: GroupedCall) -> Tiles:
    tiles = coded_tiles(shape, call.vector_memory_bytes)
    assert tiles is not None, f"{shape} fits no tile; `reads_codes` says which do"
    return tiles


def _rows_cost(
    rows: Any, codes: Any, scale: Any, layer: Any, sizes: Any, own: Any, positions: Any, *, call: Any
) -> tuple[KernelCost, ...]:
    return _cost(_shape_of(rows, codes, sizes, call), call, codes)


def _of_all_cost(rows: Any, codes: Any, scale: Any, layer: Any, *, call: Any) -> tuple[KernelCost, ...]:
    return _cost(_of_all_shape(rows, codes), call, codes)


def _rows_types(rows: Any, codes: Any, *others: Any, call: GroupedCall) -> list[Any]:
    return [jax.ShapeDtypeStruct((rows.shape[0], codes.shape[2 if call.transposed else 3]), rows.dtype)]


def _of_all_types(rows: Any, codes: Any, scale: Any, layer: Any, *, call: GroupedCall) -> list[Any]:
    return [jax.ShapeDtypeStruct((codes.shape[1], rows.shape[-2], codes.shape[-1]), rows.dtype)]


def _draw_codes(rng: np.random.Generator, rows: Any, codes: Any, scale: Any, layer: Any) -> dict[int, Any]:
    """Draw finite codes, scales near 1, and a layer."""
    return {
        1: rng.normal(size=codes.shape).astype(codes.dtype),
        2: np.exp2(rng.integers(-2, 3, scale.shape)).astype(scale.dtype),
        3: rng.integers(0, codes.shape[0], 1, np.int32),
    }


def _draw(rng: np.random.Generator, rows: Any, codes: Any, scale: Any, layer: Any, *groups: Any) -> Any:
    """Draw codes, scales, a layer, valid sizes and consecutive numbers of groups, and the positions of all rows."""
    sizes, own, _ = groups
    first = rng.integers(0, sizes.shape[0] - own.shape[0] + 1)
    return _draw_codes(rng, rows, codes, scale, layer) | {
        4: drawn_group_sizes(rng, sizes.shape, rows.shape[0]),
        5: np.arange(first, first + own.shape[0], dtype=np.int32),
        6: np.arange(rows.shape[0], dtype=np.int32),
    }


@operator("m (b d), l v (b d) n, v b n, 1, w, v, m -> m n; reduce b v; whole l d w; linear 0", cost=_rows_cost)
@taking_stacks("l", layer=3)
@stating_results(_rows_types)
@drawing_operands(_draw)
def coded_rows(rows, codes, scale, layer, sizes, own, positions, *, call: GroupedCall) -> jax.Array:
    """Multiply the rows of the groups `own` by their matrices."""
    return _rows(call, rows, codes, scale, layer, sizes, own, positions)


@operator("m n, l v (b d) n, v b n, 1, w, v, m -> m (b d); reduce n v; whole l d w; linear 0", cost=_rows_cost)
@taking_stacks("l", layer=3)
@stating_results(_rows_types)
@drawing_operands(_draw)
def coded_rows_gradient(d_out, codes, scale, layer, sizes, own, positions, *, call: GroupedCall) -> jax.Array:
    """Multiply the cotangents of the groups `own` by their transposed matrices."""
    return _rows(call, d_out, codes, scale, layer, sizes, own, positions)


@operator("t (b d), l v (b d) n, v b n, 1 -> v t n; reduce b; whole l d; linear 0", cost=_of_all_cost)
@taking_stacks("l", layer=3)
@stating_results(_of_all_types)
@drawing_operands(_draw_codes)
def coded_shared_rows(rows, codes, scale, layer, *, call: GroupedCall) -> jax.Array:
    """Multiply the same rows by all matrices."""
    return _of_all(call, rows, codes, scale, layer)


@operator("v t (b d), l v (b d) n, v b n, 1 -> v t n; reduce b; whole l d; linear 0", cost=_of_all_cost)
@taking_stacks("l", layer=3)
@stating_results(_of_all_types)
@drawing_operands(_draw_codes)
def coded_own_rows(rows, codes, scale, layer, *, call: GroupedCall) -> jax.Array:
    """Multiply the rows of each group by its matrix."""
    return _of_all(call, rows, codes, scale, layer)


@functools.partial(jax.jit, static_argnums=0)
def _rows(call: GroupedCall, rows, codes, scale, layer, sizes, own, positions):
    count = rows.shape[0]
    shape = _shape_of(rows, codes, sizes, call)
    if not count:
        return jnp.zeros((count, shape.columns), rows.dtype)
    starts, ends = group_bounds(sizes, positions)
    tile = _tiles(shape, call).rows
    padded = -(-count // tile) * tile

    def on_tpus(rows, codes, scale, layer, starts, ends):
        visits = visits_of_groups(layer, starts, ends, padded, tile)
        found = _run(call, shape, with_whole_tiles(rows, tile), codes, scale, visits, padded, kept=True)[:count]
        row = lax.broadcasted_iota(jnp.int32, (count, 1), 0)
        return jnp.where((row >= starts[0]) & (row < ends[-1]), found, 0)  # others were not computed

    def plain(rows, codes, scale, layer, starts, ends):
        tile = tiled_rows(count, sizes.shape[0])
        matrices = _values(codes, scale, layer, rows.dtype)
        return tiled_product(rows, matrices, starts, ends, tile=tile, transposed=call.transposed)

    return _by_platform(call, on_tpus, plain, rows, codes, scale, layer, starts[own], ends[own])


@functools.partial(jax.jit, static_argnums=0)
def _of_all(call: GroupedCall, rows, codes, scale, layer):
    shape, count, groups = _of_all_shape(rows, codes), rows.shape[-2], codes.shape[1]
    shared = shape.form == "shared"

    def on_tpus(rows, codes, scale, layer):
        tile = _tiles(shape, call).rows
        rows = jnp.pad(rows, [*([] if shared else [(0, 0)]), (0, tile - count), (0, 0)]).reshape(-1, shape.inner)
        visits = visits_of_all(layer, groups, tile, shared=shared)
        found = _run(call, shape, rows, codes, scale, visits, groups * tile, kept=False)
        return found.reshape(groups, tile, shape.columns)[:, :count]

    def plain(rows, codes, scale, layer):
        return jnp.einsum("tk,ekn->etn" if shared else "etk,ekn->etn", rows, _values(codes, scale, layer, rows.dtype))

    return _by_platform(call, on_tpus, plain, rows, codes, scale, layer)


def _run(
    call: GroupedCall, shape: CodedShape, rows: Any, codes: Any, scale: Any, visits: Visits, count: int, *, kept: bool
) -> jax.Array:
    tiles = _tiles(shape, call)
    # XLA copies scales into another layout for the kernel. Without the barrier, it may do so early in the step and keep
    # the copy in main memory until here.
    rows, scale = lax.optimization_barrier((rows, scale))
    return coded_product(
        rows, codes, scale, visits,
        result_rows=count, transposed=call.transposed, tiles=tiles, kept=kept, cost=coded_cost(shape, tiles),
        vector_memory_bytes=kernel_memory(tiles), interpret=call.interpret,
    )  # fmt: skip


def _by_platform(call: GroupedCall, on_tpus: Any, plain: Any, *args: Any) -> Any:
    """Run the kernel on TPUs, and the same computation in plain JAX elsewhere."""
    return on_tpus(*args) if call.interpret else lax.platform_dependent(*args, default=plain, tpu=on_tpus)


def _values(codes: Any, scale: Any, layer: Any, dtype: Any) -> jax.Array:
    """Return the matrices of a layer, `[groups, k, n]`."""
    own = lax.dynamic_index_in_dim(codes, layer[0], keepdims=False).astype(dtype)
    groups, inner, outputs = own.shape
    values = own.reshape(groups, -1, BLOCK, outputs) * scale[:, :, None].astype(dtype)
    return values.reshape(groups, inner, outputs)
