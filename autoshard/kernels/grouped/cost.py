"""The cost of grouped products on one device.

The cost assumes balanced routing: a device with a part of the groups has the same part of the rows, and all groups have
the same size. Rows of other devices' groups cost nothing. A tile that several groups share is computed once for each of
them, so each group after the first adds a visit.
"""

from __future__ import annotations

from typing import Any

from autoshard.kernels.constants import (
    FLOAT32,
    GRADIENT_VECTOR_OPS,
    GRAPH_LAUNCH_US,
    LOOP_WAIT_US,
    STEP_OVERHEAD_US,
    TILE_KERNELS,
    TILE_KERNELS_GRADIENT,
    TRITON_NEIGHBOURS,
    TRITON_REACHED,
)
from autoshard.kernels.grouped.tiles import Shape, Tiles, gradient_tiles, product_tiles, tiled_rows
from autoshard.kernels.grouped.triton import Blocks, gradient_blocks, product_blocks
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

Costs = tuple[KernelCost, ...]
"""The costs of kernels that run one after another."""


def product_cost(rows: Any, weights: Any, sizes: Any, own: Any, positions: Any, *, call: Any) -> Costs:
    """Return the cost of the product of rows and the matrices of their groups.

    Args:
        rows: `[m, k]`; anything with a shape and a dtype.
        weights: `[groups, k, n]`, or `[groups, n, k]` if transposed.
        sizes: number of rows of each group, including the groups of other devices.
        own: the groups that have a matrix here.
        positions: the positions of the rows.
        call: the `GroupedCall`.
    """
    shape = shape_of(rows, weights.shape[1] if call.transposed else weights.shape[2], sizes, own)
    if call.kernel == "triton" and (blocks := product_blocks(shape.inner, shape.columns)):
        return (triton_product_cost(shape, blocks),)
    if call.kernel != "megablox":
        return tiled_product_cost(shape, tiled_rows(rows.shape[0], sizes.shape[0]), launches=_launches(call))
    return (product_kernel_cost(shape, product_tiles(shape, rows.shape[0], call.vector_memory_bytes)),)


def gradient_cost(rows: Any, d_out: Any, sizes: Any, own: Any, positions: Any, *, call: Any) -> Costs:
    """Return the cost of the gradient of the matrices.

    `d_out` is the cotangent of the product, `[m, n]`. The other arguments are those of `product_cost`.
    """
    shape = shape_of(rows, d_out.shape[1], sizes, own)
    if call.kernel == "triton" and (blocks := gradient_blocks(shape.inner, shape.columns)):
        return (triton_gradient_cost(shape, blocks),)
    if call.kernel != "megablox":
        return tiled_gradient_cost(shape, tiled_rows(rows.shape[0], sizes.shape[0]), launches=_launches(call))
    return (gradient_kernel_cost(shape, gradient_tiles(shape, rows.shape[0], call.vector_memory_bytes)),)


def shape_of(rows: Any, columns: int, sizes: Any, own: Any) -> Shape:
    """Return the shape of a product on one device, with the rows that it has of its own groups."""
    (count, inner), groups = rows.shape, own.shape[0]
    return Shape(count * groups / sizes.shape[0], inner, columns, groups, rows.dtype.itemsize)


def product_kernel_cost(shape: Shape, tiles: Tiles) -> KernelCost:
    """Return the cost of the TPU's kernel of a product with these tiles."""
    return KernelCost(
        flops=shape.flops(tiles),
        itemsize=shape.itemsize,
        moved_bytes=shape.product_bytes(tiles),
        overhead_us=shape.steps(tiles) * STEP_OVERHEAD_US,
    )


def gradient_kernel_cost(shape: Shape, tiles: Tiles) -> KernelCost:
    """Return the cost of the TPU's kernel of the gradient of the matrices with these tiles."""
    elements = shape.steps(tiles) * tiles.rows * (tiles.inner + tiles.columns)
    return KernelCost(
        flops=shape.flops(tiles),
        itemsize=shape.itemsize,
        moved_bytes=shape.gradient_bytes(tiles),
        vector_ops=float(elements * GRADIENT_VECTOR_OPS),
        overhead_us=shape.steps(tiles) * STEP_OVERHEAD_US,
    )


def triton_product_cost(shape: Shape, blocks: Blocks) -> KernelCost:
    """Return the cost of the Triton kernel of a product. Neighbouring programs share their reads."""
    read = Tiles(blocks.rows * TRITON_NEIGHBOURS, blocks.contracted, shape.columns)
    return _triton(shape, blocks.rows, shape.product_bytes(read))


def triton_gradient_cost(shape: Shape, blocks: Blocks) -> KernelCost:
    """Return the cost of the Triton kernel of the gradient of the matrices."""
    read = Tiles(blocks.contracted, blocks.rows * TRITON_NEIGHBOURS, blocks.columns * TRITON_NEIGHBOURS)
    return _triton(shape, blocks.contracted, shape.gradient_bytes(read))


def _triton(shape: Shape, tile: int, moved: float) -> KernelCost:
    """Return the cost of a Triton kernel that computes `tile` rows at a time, in a group's last tile too."""
    flops = shape.flops(Tiles(tile, shape.inner, shape.columns))
    return KernelCost(flops, shape.itemsize, moved, efficiency=TRITON_REACHED)


def tiled_product_cost(shape: Shape, tile: int, *, launches: bool) -> Costs:
    """Return the cost of a product in plain JAX: a loop over tiles of `tile` rows, each with all columns.

    If the host launches each kernel of the loop, slices of rows and matrices are copied before each product. Another
    kernel reads the product and the rows of the result, and writes these rows.
    """
    visits, tiles = shape.visits(tile), Tiles(tile, shape.inner, shape.columns)
    product = KernelCost(shape.flops(tiles), shape.itemsize, shape.product_bytes(tiles))
    copied = 2.0 * (tile + shape.columns) * shape.inner + 3.0 * tile * shape.columns
    return (product, _copies(visits, copied * shape.itemsize, TILE_KERNELS)) if launches else (product,)


def tiled_gradient_cost(shape: Shape, tile: int, *, launches: bool) -> Costs:
    """Return the cost of the gradient of the matrices in plain JAX: each visit adds to its group's gradient.

    If the host launches each kernel of the loop, masked slices are copied before each product, and the group's gradient
    after it. Another kernel reads both, and writes their sum.
    """
    visits, tiles = shape.visits(tile), Tiles(tile, shape.inner, shape.columns)
    gradient = float(shape.inner * shape.columns * FLOAT32)
    moved, held = shape.gradient_bytes(tiles), shape.groups * gradient
    if not launches:
        return (KernelCost(shape.flops(tiles), shape.itemsize, moved + 2.0 * visits * gradient, held),)
    product = KernelCost(shape.flops(tiles), shape.itemsize, moved + visits * gradient, held)
    copied = 2.0 * tile * (shape.inner + shape.columns) * shape.itemsize + 5.0 * gradient
    return product, _copies(visits, copied, TILE_KERNELS_GRADIENT)


def _launches(call: Any) -> bool:
    """Return whether the host launches the loop's kernels. A call with the Triton kernel is for a GPU."""
    return call.launches or call.kernel == "triton"


def _copies(visits: int, copied: float, kernels: int) -> KernelCost:
    """Return the cost of a loop's other kernels on a GPU. They run one at a time, and move `copied` bytes a visit."""
    overhead = visits * (LOOP_WAIT_US + kernels * GRAPH_LAUNCH_US)
    return KernelCost(0.0, 4, visits * copied, overhead_us=overhead)
