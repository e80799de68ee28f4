"""JAX's grouped matrix products for TPUs (megablox): one matrix for each group of consecutive rows."""

from __future__ import annotations

import inspect
from typing import Any

from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from autoshard._compat.pallas_calls import with_costs

Stated = tuple[float, float, float]
"""FLOPs, transcendental operations and bytes accessed."""


def product(
    rows: Any, weights: Any, sizes: Any, first: Any, *,
    transposed: bool, tiles: tuple[int, int, int], stated: Stated, vector_memory_bytes: int, interpret: bool,
) -> Any:  # fmt: skip
    """Multiplies each row by the matrix of its group. Rows of groups without a matrix are arbitrary.

    Args:
        rows: `[m, k]`; the tile of rows divides `m`.
        weights: the matrices of consecutive groups, `[groups, k, n]`, or `[groups, n, k]` if `transposed`.
        sizes: the number of rows in each of all groups, int32.
        first: the group of the first matrix, an int32 scalar.
        transposed: whether the matrices are transposed.
        tiles: rows, contracted elements and columns of a tile.
        stated: what the kernel states to the compiler.
        vector_memory_bytes: the vector memory that the kernel may use.
        interpret: whether Pallas interprets the kernel.
    """

    def run(rows: Any, weights: Any, sizes: Any, first: Any) -> Any:
        return inspect.unwrap(gmm)(
            rows, weights, sizes, rows.dtype, tiles, first, transpose_rhs=transposed, interpret=interpret
        )

    return with_costs(run, {"": stated}, rows, weights, sizes, first, vector_memory_bytes=vector_memory_bytes)


def weight_gradient(
    rows: Any, d_out: Any, sizes: Any, first: Any, *,
    groups: int, dtype: Any, tiles: tuple[int, int, int], stated: Stated, vector_memory_bytes: int, interpret: bool,
) -> Any:  # fmt: skip
    """Computes `rows.T @ d_out` over the rows of each of `groups` consecutive groups: `[groups, k, n]`.

    The other arguments are those of `product`. A group without rows gives zeros.
    """

    def run(rows: Any, d_out: Any, sizes: Any, first: Any) -> Any:
        return inspect.unwrap(tgmm)(
            rows.T, d_out, sizes, dtype, tiles, first, num_actual_groups=groups, interpret=interpret
        )

    return with_costs(run, {"": stated}, rows, d_out, sizes, first, vector_memory_bytes=vector_memory_bytes)
