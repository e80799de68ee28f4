"""Tile sizes of grouped products, chosen by shape.

The tiles of rows of a product `[m, k] x [groups, k, n]` do not respect groups. So a kernel visits a tile once for each
group that has rows in it: at most `m / tile + groups - 1` visits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoshard._shown import shown
from autoshard.kernels.constants import (
    FLOAT32,
    FLOPS_PER_BYTE,
    LANES,
    LARGEST_TILE,
    SMALLEST_ROW_TILE,
    STEP_BYTES,
    TILED_ROWS,
    VECTOR_MEMORY_SHARE,
)


@shown
class Tiles(NamedTuple):
    """Sizes of a tile: rows, the inner dimension (`k`) and columns (`n`)."""

    rows: int
    inner: int
    columns: int


@shown
class Shape(NamedTuple):
    """Sizes of a grouped product on one device.

    Attributes:
        rows: the number of rows that belong to these groups.
        inner: elements of a row, `k`.
        columns: elements of a row of the result, `n`.
        groups: the number of groups with a matrix here.
        itemsize: bytes of an element.
    """

    rows: float
    inner: int
    columns: int
    groups: int
    itemsize: int

    def visits(self, tile: int) -> int:
        """Return the largest number of visits to tiles of `tile` rows, for each tile of columns and inner elements."""
        return math.ceil(self.rows / tile) + self.groups - 1

    def flops(self, tiles: Tiles) -> float:
        """Return the FLOPs of a kernel. A tile that several groups share is computed for each of them."""
        return 2.0 * self.visits(tiles.rows) * tiles.rows * self.inner * self.columns

    def product_bytes(self, tiles: Tiles) -> float:
        """Return the bytes that the product's kernel reads and writes: rows x matrices -> rows.

        Rows are read for each tile of columns. A matrix stays in vector memory from one tile of rows to the next if the
        tile has all inner elements; else it is read at each visit.
        """
        visits = self.visits(tiles.rows)
        read = visits * tiles.rows * self.inner * math.ceil(self.columns / tiles.columns)
        weights = self.inner * self.columns * (self.groups if tiles.inner >= self.inner else visits)
        return (read + weights + visits * tiles.rows * self.columns) * self.itemsize

    def gradient_bytes(self, tiles: Tiles) -> float:
        """Return the bytes that the kernel of the gradient of the matrices reads and writes: rows x rows -> matrices.

        Each operand is read once for every tile of the other operand's elements. Each gradient is written once.
        """
        rows = self.visits(tiles.rows) * tiles.rows
        read = rows * self.inner * math.ceil(self.columns / tiles.columns)
        read += rows * self.columns * math.ceil(self.inner / tiles.inner)
        return (read + self.groups * self.inner * self.columns) * self.itemsize

    def steps(self, tiles: Tiles) -> int:
        """Return the steps of a kernel's grid."""
        across = math.ceil(self.inner / tiles.inner) * math.ceil(self.columns / tiles.columns)
        return self.visits(tiles.rows) * across


@functools.lru_cache(maxsize=1024)
def product_tiles(shape: Shape, rows: int, vector_memory_bytes: int) -> Tiles:
    """Return the tile sizes of a product that fit the vector memory and take the least time.

    Args:
        shape: the shape of the product.
        rows: the number of rows that the arrays have.
        vector_memory_bytes: the vector memory that the kernel may use.
    """

    def held(t: Tiles) -> int:
        blocks = t.rows * t.inner + t.inner * t.columns + t.rows * t.columns  # double-buffered
        return 2 * blocks * shape.itemsize + 2 * t.rows * t.columns * FLOAT32  # the sum, and a product

    return _best(shape, rows, shape.product_bytes, held, vector_memory_bytes)


@functools.lru_cache(maxsize=1024)
def gradient_tiles(shape: Shape, rows: int, vector_memory_bytes: int) -> Tiles:
    """Return the tile sizes of the gradient of the matrices. The arguments are those of `product_tiles`."""

    def held(t: Tiles) -> int:
        blocks = t.rows * t.inner + t.rows * t.columns + t.inner * t.columns
        masked = 2 * t.rows * t.inner + t.rows * t.columns  # operands with other groups' rows zeroed, and transposed
        return 2 * blocks * shape.itemsize + (2 * t.inner * t.columns + masked) * FLOAT32

    return _best(shape, rows, shape.gradient_bytes, held, vector_memory_bytes)


def padded_rows(rows: int) -> int:
    """Return the number of rows that arrays are padded to: a multiple of the smallest tile."""
    return -(-rows // SMALLEST_ROW_TILE) * SMALLEST_ROW_TILE


def tiled_rows(rows: int, groups: int) -> int:
    """Return the rows of a tile where a grouped product runs in plain JAX: a power of 2, about the size of a group."""
    return min(max(2 ** round(math.log2(max(rows / groups, 1))), 1), TILED_ROWS)


def _best(
    shape: Shape, rows: int, moved: Callable[[Tiles], float], held: Callable[[Tiles], int], vector_memory_bytes: int
) -> Tiles:
    """Return the fastest tiles that fit: arithmetic and memory traffic overlap, and each step of the grid adds time."""

    def time(t: Tiles) -> float:
        return max(shape.flops(t) / FLOPS_PER_BYTE, moved(t)) + shape.steps(t) * STEP_BYTES

    candidates = [
        Tiles(m, k, n) for m in _divisors(padded_rows(rows)) for k in _sizes(shape.inner) for n in _sizes(shape.columns)
    ]
    fitting = [t for t in candidates if held(t) <= vector_memory_bytes * VECTOR_MEMORY_SHARE]
    return min(fitting or [min(candidates, key=held)], key=time)


def _divisors(rows: int) -> Iterable[int]:
    """Return the tile sizes of rows: the smallest, doubled as long as they divide their number."""
    tile = SMALLEST_ROW_TILE
    while tile <= LARGEST_TILE and rows % tile == 0:
        yield tile
        tile *= 2


def _sizes(size: int) -> Sequence[int]:
    """Return the tile sizes of a dimension: all of it, and multiples of a vector register's lanes that pad little."""
    tiles = [t for t in range(LANES, min(size, LARGEST_TILE), LANES) if -(-size // t) * t <= size + size // 8]
    return [size, *tiles]
