"""Tiles and cost of the kernel that reads codes.

As for other grouped products, the cost assumes balanced routing. Codes and scales are read once. Sorted rows are read
again for each tile of columns, except if there is only one tile of rows.

XLA:TPU stores an array with its last two dimensions in the order that needs less padding to tiles of 8 x 128. A kernel
takes them in the given order. So if the columns of a shard need more padding than its inputs, XLA copies the codes for
the kernel. It copies the codes of all layers at once. Each layer counts its part.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from autoshard._shown import shown
from autoshard.kernels.constants import (
    CODED_ROWS,
    DECODED_ELEMENTS,
    DECODING_VECTOR_OPS,
    FLOAT32,
    FLOPS_PER_BYTE,
    LANES,
    LARGEST_CODED_ROWS,
    LARGEST_TILE,
    SCOPED_VMEM_BYTES,
    STEP_BYTES,
    STEP_OVERHEAD_US,
    SUBLANES,
    VECTOR_MEMORY_SHARE,
)
from autoshard.kernels.grouped.codes.decoding import BLOCK
from autoshard.kernels.grouped.tiles import Tiles
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

_ITEMSIZE = 2  # of rows and decoded matrices, in bfloat16
_CODE_BYTES = 0.5 + 1 / BLOCK  # of a code, with its part of a scale


@shown
class CodedShape(NamedTuple):
    """Sizes of a product with matrices in codes, on one device.

    Attributes:
        rows: the number of rows that belong to the groups, or that each group has.
        inner: contracted elements.
        columns: elements of a row of the result.
        groups: the number of matrices.
        form: `sorted` groups of rows; `own`, where each group has its own tile of rows; or `shared`, where all groups
            have the same tile of rows.
        transposed: whether the matrices are transposed. Their inputs, which scales count, are then the columns.
    """

    rows: float
    inner: int
    columns: int
    groups: int
    form: str
    transposed: bool = False

    def visits(self, tile: int) -> float:
        """Return the most visits for each tile of columns."""
        return self.groups if self.form != "sorted" else self._tiles(tile) + self.groups - 1

    def _tiles(self, tile: int) -> float:
        """Return the tiles of the result's rows."""
        return self.groups if self.form != "sorted" else -(-self.rows // tile)

    def across(self, tiles: Tiles) -> int:
        """Return the tiles of columns."""
        return -(-self.columns // tiles.columns)

    def flops(self, tiles: Tiles) -> float:
        """Return the FLOPs of the kernel."""
        return 2.0 * self.visits(tiles.rows) * tiles.rows * self.inner * self.columns

    def moved_bytes(self, tiles: Tiles) -> float:
        """Return the bytes that the kernel reads and writes."""
        reads = self.groups if self.form == "own" else 1
        if self.form == "sorted" and self._tiles(tiles.rows) > 1:
            reads = self.visits(tiles.rows) * self.across(tiles)
        read = reads * tiles.rows * self.inner
        written = self._tiles(tiles.rows) * tiles.rows * self.columns
        return (read + written) * _ITEMSIZE + self.groups * self.inner * self.columns * _CODE_BYTES

    def steps(self, tiles: Tiles) -> float:
        """Return the steps of the kernel's grid."""
        return self.visits(tiles.rows) * self.across(tiles)


@functools.lru_cache(maxsize=1024)
def coded_tiles(shape: CodedShape, vector_memory_bytes: int) -> Tiles | None:
    """Return the fastest tiles that fit the vector memory; None if none do.

    A tile has all contracted elements. Tiles of columns are whole registers of codes and of scales, or all columns.

    >>> coded_tiles(CodedShape(32, 2880, 2880, 4, "shared"), 64 * 2**20)
    Tiles(rows=32, inner=2880, columns=640)
    """
    part = LANES if not shape.transposed else SUBLANES * BLOCK
    across = [n for n in range(part, LARGEST_TILE + 1, part) if n < shape.columns] + [shape.columns]
    candidates = [Tiles(m, shape.inner, n) for m in _row_tiles(shape) for n in across]
    fitting = [
        t
        for t in candidates
        if t.inner * t.columns <= DECODED_ELEMENTS and _held(t) <= vector_memory_bytes * VECTOR_MEMORY_SHARE
    ]

    def time(t: Tiles) -> float:
        padding = shape.across(t) * t.columns / shape.columns  # decoded, too
        return max(shape.flops(t) / FLOPS_PER_BYTE, shape.moved_bytes(t) * padding) + shape.steps(t) * STEP_BYTES

    return min(fitting, key=time, default=None)


def coded_cost(shape: CodedShape, tiles: Tiles) -> KernelCost:
    """Return the cost of the kernel with these tiles."""
    return KernelCost(
        flops=shape.flops(tiles),
        itemsize=_ITEMSIZE,
        moved_bytes=shape.moved_bytes(tiles),
        vector_ops=float(shape.groups * shape.inner * shape.across(tiles) * tiles.columns * DECODING_VECTOR_OPS),
        overhead_us=shape.steps(tiles) * STEP_OVERHEAD_US,
    )


def layout_copy(groups: int, inputs: int, outputs: int) -> KernelCost | None:
    """Return the cost of the copy of the codes `[groups, inputs, outputs]` of a layer; None if XLA makes none.

    >>> layout_copy(4, 2880, 2880), layout_copy(8, 1440, 2880)
    (None, None)
    >>> layout_copy(8, 2880, 1440).moved_bytes
    33177600.0
    """
    given, turned = (_ceiling(m, SUBLANES) * _ceiling(n, LANES) for m, n in ((inputs, outputs), (outputs, inputs)))
    return None if given <= turned else KernelCost(0.0, _ITEMSIZE, 2 * 0.5 * groups * inputs * outputs)


def _ceiling(size: int, part: int) -> int:
    return -(-size // part) * part


def kernel_memory(tiles: Tiles) -> int:
    """Return the bytes of vector memory that the kernel asks for: the compiler may use the rest for whole arrays."""
    return max(math.ceil(_held(tiles) / VECTOR_MEMORY_SHARE), SCOPED_VMEM_BYTES)


def _row_tiles(shape: CodedShape) -> list[int]:
    """Return the sizes of tiles of rows: doubled from the smallest, up to about the rows of a group."""
    if shape.form != "sorted":
        return [int(-(-shape.rows // CODED_ROWS) * CODED_ROWS)]
    sizes = [CODED_ROWS]
    while sizes[-1] < min(shape.rows / shape.groups, LARGEST_CODED_ROWS):
        sizes.append(2 * sizes[-1])
    return sizes


def _held(t: Tiles) -> float:
    """Return the bytes of vector memory: blocks in two buffers, the decoded tile in 16 and 32 bits, and the product."""
    matrix, result = t.inner * t.columns, t.rows * t.columns
    blocks = 2 * ((t.rows * t.inner + result) * _ITEMSIZE + matrix * _CODE_BYTES)
    return blocks + matrix * (_ITEMSIZE + FLOAT32) + 2 * result * FLOAT32
