"""Grouped products as Pallas kernels that Triton compiles, for NVIDIA GPUs.

A program of the grid computes one block of the result. For the product, XLA first computes a table of the rows and the
group of each block. Blocks of rows begin where groups begin, so no block has rows of two groups. For the gradient of
the matrices, each program sums over all rows of its group.

Sources: MegaBlocks (arXiv:2211.15841) for the table of blocks; the order of programs is that of Triton's tutorial on
matrix products (https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas

from autoshard._compat.pallas_triton import triton
from autoshard._shown import shown
from autoshard.kernels.constants import (
    TRITON_COLUMNS,
    TRITON_GRADIENT_ROWS,
    TRITON_INNER,
    TRITON_NEIGHBOURS,
    TRITON_ROWS,
    TRITON_STAGES,
    TRITON_WARPS,
)
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost


@shown
class Blocks(NamedTuple):
    """Sizes of the blocks of a kernel, and how Triton compiles it.

    Attributes:
        rows: rows of a block of the product. The gradient of the matrices reads `contracted` rows at a time instead.
        columns: columns of a block of the result.
        contracted: number of contracted elements that are multiplied at a time.
        warps: the warps of 32 threads that compute a block.
        stages: the number of loads in flight.
    """

    rows: int
    columns: int
    contracted: int
    warps: int = TRITON_WARPS
    stages: int = TRITON_STAGES


def product_blocks(inner: int, columns: int) -> Blocks | None:
    """Return the blocks of a product `[m, inner] x [groups, inner, columns]`, or None if no block divides a dimension.

    >>> product_blocks(1024, 3584), product_blocks(1024, 100)
    (Blocks(rows=128, columns=256, contracted=64, warps=8, stages=3), None)
    """
    contracted, across = _divisor(inner, TRITON_INNER), _divisor(columns, TRITON_COLUMNS)
    return Blocks(TRITON_ROWS, across, contracted) if contracted and across else None


def gradient_blocks(inner: int, columns: int) -> Blocks | None:
    """Return the blocks of the gradient of the matrices, `[groups, inner, columns]`; None if none divides them."""
    along, across = _divisor(inner, TRITON_ROWS), _divisor(columns, TRITON_COLUMNS)
    return Blocks(along, across, TRITON_GRADIENT_ROWS) if along and across else None


def blocks_of_rows(rows: int, groups: int, block: int) -> int:
    """Return the most blocks of rows that groups of any sizes need.

    Each group may end with a part of a block, and so may the rows before and after all groups.
    """
    return (rows + (groups + 2) * (block - 1)) // block


def triton_product(
    rows: jax.Array, weights: jax.Array, starts: jax.Array, ends: jax.Array, *,
    transposed: bool, blocks: Blocks, cost: KernelCost, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Return rows times the matrices of their groups, `[m, n]`; zeros in rows outside of all groups.

    Args:
        rows: `[m, k]`.
        weights: `[groups, k, n]`, or `[groups, n, k]` if `transposed`.
        starts: first row of each group, int32 `[groups]`; groups are consecutive.
        ends: the row after the last one of each group.
        transposed: whether the matrices are transposed.
        blocks: `product_blocks(k, n)`.
        cost: what the kernel states for audits.
        interpret: whether Pallas interprets the kernel.
    """
    count, inner = rows.shape
    groups, columns = weights.shape[0], weights.shape[1 if transposed else 2]
    visits = blocks_of_rows(count, groups, blocks.rows)
    group, first, end, steps = _table(starts, ends, count, visits, blocks, inner)
    across = columns // blocks.columns
    # The interpreter shifts slices that reach beyond the array, so it needs more rows. Compiled kernels mask them.
    padded = jnp.pad(rows, ((0, blocks.rows), (0, 0))) if interpret else rows
    out = pallas.pallas_call(
        functools.partial(_product_kernel, transposed=transposed, blocks=blocks, visits=visits, across=across),
        grid=(visits * across,),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], columns), rows.dtype),
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        metadata=_stated(cost),
        name="grouped_product",
    )(group, first, end, steps, padded, weights)
    return out[:count]


def triton_gradient(
    rows: jax.Array, d_out: jax.Array, starts: jax.Array, ends: jax.Array, *,
    blocks: Blocks, cost: KernelCost, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Return the gradient of the matrices, `[groups, k, n]`, summed in float32; zeros for groups without rows.

    Args:
        rows: `[m, k]`.
        d_out: cotangent of the product, `[m, n]`.
        starts: first row of each group, int32 `[groups]`.
        ends: the row after the last one of each group.
        blocks: `gradient_blocks(k, n)`.
        cost: what the kernel states for audits.
        interpret: whether Pallas interprets the kernel.
    """
    groups, inner, columns = starts.shape[0], rows.shape[1], d_out.shape[1]
    along, across = inner // blocks.rows, columns // blocks.columns
    if interpret:
        rows, d_out = (jnp.pad(x, ((0, blocks.contracted), (0, 0))) for x in (rows, d_out))
    return pallas.pallas_call(
        functools.partial(_gradient_kernel, blocks=blocks, along=along, across=across),
        grid=(along * across, groups),
        out_shape=jax.ShapeDtypeStruct((groups, inner, columns), rows.dtype),
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        metadata=_stated(cost),
        name="grouped_weights_gradient",
    )(starts, ends, rows, d_out)


def _table(starts: Any, ends: Any, count: int, visits: int, blocks: Blocks, inner: int) -> tuple[Any, ...]:
    """Return for each block of rows: its group, its first row, the row after its last one, and its steps.

    Rows before and after all groups have blocks too, with no steps: their result is zero. Blocks without rows are last.
    """
    firsts = jnp.concatenate([jnp.zeros(1, jnp.int32), starts, ends[-1:]])
    lasts = jnp.concatenate([starts[:1], ends, jnp.full(1, count, jnp.int32)])
    numbers = (lasts - firsts + blocks.rows - 1) // blocks.rows
    after = jnp.cumsum(numbers, dtype=jnp.int32)
    visit = lax.iota(jnp.int32, visits)
    span = jnp.sum(after[None, :] <= visit[:, None], axis=1, dtype=jnp.int32)
    known = jnp.minimum(span, firsts.shape[0] - 1)
    first = firsts[known] + (visit - (after - numbers)[known]) * blocks.rows
    end = jnp.where(span == known, lasts[known], 0)
    real = (known > 0) & (known <= starts.shape[0]) & (span == known)
    steps = jnp.where(real, inner // blocks.contracted, 0)
    return jnp.clip(known - 1, 0, starts.shape[0] - 1), jnp.minimum(first, count), end, steps


def _product_kernel(
    group_ref: Any, first_ref: Any, end_ref: Any, steps_ref: Any, rows_ref: Any, weights_ref: Any, out_ref: Any, *,
    transposed: bool, blocks: Blocks, visits: int, across: int,
) -> None:  # fmt: skip
    visit, column = _place(pallas.program_id(0), visits, across)
    group, first, end = group_ref[visit], first_ref[visit], end_ref[visit]
    here, columns = pallas.ds(first, blocks.rows), pallas.ds(column * blocks.columns, blocks.columns)
    mask = (first + lax.iota(jnp.int32, blocks.rows) < end)[:, None]

    def step(number: Any, total: Any) -> Any:
        inner = pallas.ds(number * blocks.contracted, blocks.contracted)
        left = triton.load(rows_ref.at[here, inner], mask=mask, other=0)
        right = weights_ref[group, columns, inner] if transposed else weights_ref[group, inner, columns]
        return total + triton.dot(left, right, trans_b=transposed)

    total = lax.fori_loop(0, steps_ref[visit], step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    triton.store(out_ref.at[here, columns], total.astype(out_ref.dtype), mask=mask)


def _gradient_kernel(
    starts_ref: Any, ends_ref: Any, rows_ref: Any, d_out_ref: Any, out_ref: Any, *,
    blocks: Blocks, along: int, across: int,
) -> None:  # fmt: skip
    group = pallas.program_id(1)
    row, column = _place(pallas.program_id(0), along, across)
    start, end = starts_ref[group], ends_ref[group]
    inner, columns = pallas.ds(row * blocks.rows, blocks.rows), pallas.ds(column * blocks.columns, blocks.columns)

    def step(number: Any, total: Any) -> Any:
        first = start + number * blocks.contracted
        here = pallas.ds(first, blocks.contracted)
        mask = (first + lax.iota(jnp.int32, blocks.contracted) < end)[:, None]
        left = triton.load(rows_ref.at[here, inner], mask=mask, other=0)
        right = triton.load(d_out_ref.at[here, columns], mask=mask, other=0)
        return total + triton.dot(left, right, trans_a=True)

    steps = (end - start + blocks.contracted - 1) // blocks.contracted
    total = lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    out_ref[group, inner, columns] = total.astype(out_ref.dtype)


def _place(program: Any, along: int, across: int) -> tuple[Any, Any]:
    """Return the block of rows and the block of columns of a program.

    Programs that run at the same time share few blocks of rows and of columns, so most reads hit the cache.
    """
    strip = program // (TRITON_NEIGHBOURS * across)
    first = strip * TRITON_NEIGHBOURS
    height = jnp.minimum(along - first, TRITON_NEIGHBOURS)
    inside = program - strip * TRITON_NEIGHBOURS * across
    return first + inside % height, inside // height


def _stated(cost: KernelCost) -> dict[str, str]:
    """Return a cost as metadata of the kernel. XLA ignores it, and audits read it (`sharding.hlo.triton_calls`)."""
    return {name: repr(getattr(cost, name)) for name in ("flops", "itemsize", "moved_bytes", "efficiency")}


def _divisor(size: int, largest: int) -> int:
    """Return the largest power of 2 up to `largest` that divides a size, or 0 if it is below Triton's least, 16."""
    found = min(size & -size, largest)
    return found if found >= 16 else 0
