"""Products of rows with matrices in codes, as one Pallas kernel for TPUs.

The kernel visits pairs of a tile of rows and a matrix. The tile of a matrix has all contracted elements, so nothing is
summed over steps. If a matrix may have several visits, they are consecutive for each tile of columns, and the kernel
keeps the decoded tile in between. Visits to the same tile of the result are consecutive, too. Each of them writes its
own rows. If each matrix has one visit, it computes all columns before the next visit, and rows are read once.

The codes are those of all layers, and the kernel gets the number of a layer. XLA would copy a slice of an array for a
kernel, such as the codes of a layer inside of a scan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import tpu

from autoshard._shown import shown
from autoshard.kernels.constants import VECTOR_OPS
from autoshard.kernels.grouped.codes.decoding import BLOCK, decoded_tile
from autoshard.kernels.grouped.tiled import group_of, visits_of
from autoshard.kernels.grouped.tiles import Tiles
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost


@shown
class Visits(NamedTuple):
    """The visits of a kernel, in order. All are int32 `[visits]`, but for `layer` and `count`.

    Attributes:
        layer: the layer of all matrices, int32 `[1]`.
        group: the matrix of each visit.
        source: the tile of rows.
        target: the tile of the result.
        first: the first row of the result that the visit computes.
        end: the row after the last one.
        count: the number of visits, int32 `[1]`. Those after it do nothing. They repeat the last visit, so they read
            nothing either.
    """

    layer: jax.Array
    group: jax.Array
    source: jax.Array
    target: jax.Array
    first: jax.Array
    end: jax.Array
    count: jax.Array


def visits_of_groups(layer: jax.Array, starts: jax.Array, ends: jax.Array, rows: int, tile: int) -> Visits:
    """Return the visits for consecutive groups of rows, `[starts[g], ends[g])`.

    Args:
        layer: int32 `[1]`.
        starts: int32 `[groups]`.
        ends: int32 `[groups]`.
        rows: the number of rows, a multiple of `tile`.
        tile: rows of a tile.
    """
    visits = visits_of(starts, ends, tile)
    number = jnp.minimum(lax.iota(jnp.int32, rows // tile + starts.shape[0] - 1), jnp.maximum(visits.count - 1, 0))
    group = group_of(visits, number)
    place = jnp.minimum(starts[group] // tile + number - visits.first[group], rows // tile - 1)
    return Visits(layer, group, place, place, starts[group], ends[group], visits.count[None])


def visits_of_all(layer: jax.Array, groups: int, tile: int, *, shared: bool) -> Visits:
    """Return the visits where each group has one tile of rows of its own, or all share one tile of rows."""
    number = lax.iota(jnp.int32, groups)
    source = jnp.zeros_like(number) if shared else number
    ends = (number + 1) * tile
    return Visits(layer, number, source, number, ends - tile, ends, jnp.full(1, groups, jnp.int32))


def coded_product(
    rows: jax.Array, codes: jax.Array, scale: jax.Array, visits: Visits, *,
    result_rows: int, transposed: bool, tiles: Tiles, kept: bool, cost: KernelCost, vector_memory_bytes: int,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """Return rows times the matrices of their groups, `[result_rows, n]`; rows that no visit computes are arbitrary.

    Args:
        rows: bfloat16 `[m, k]`; `tiles.rows` divides `m`.
        codes: of all layers, float4_e2m1fn `[layers, groups, k, n]`, or `[layers, groups, n, k]` if `transposed`.
        scale: of the layer, float8_e8m0fnu; a scale of each 32 codes along the dimension before the last one.
        visits: see above.
        result_rows: a multiple of `tiles.rows`.
        transposed: whether the matrices are transposed.
        tiles: rows, all contracted elements, and columns of a tile.
        kept: whether a matrix, or a tile of the result, may have several visits.
        cost: what the kernel states to the compiler.
        vector_memory_bytes: the vector memory that the kernel may use.
        interpret: whether Pallas interprets the kernel.
    """
    inner, columns = rows.shape[1], codes.shape[2 if transposed else 3]
    tile = (tiles.columns, inner) if transposed else (inner, tiles.columns)

    order = (1, 0) if kept else (0, 1)  # the dimensions of the grid that count visits and tiles of columns
    sizes = visits.group.shape[0], -(-columns // tiles.columns)

    def block(shape: tuple[int | None, ...], index: Callable[[Any, Any, Visits], tuple[Any, ...]]) -> pallas.BlockSpec:
        return pallas.BlockSpec(shape, lambda *at: index(at[order[0]], at[order[1]], Visits(*at[2:])))

    def matrix(visit: Any, column: Any, tables: Visits) -> tuple[Any, ...]:
        return (tables.group[visit], column, 0) if transposed else (tables.group[visit], 0, column)

    def of_layer(visit: Any, column: Any, tables: Visits) -> tuple[Any, ...]:
        return tables.layer[0], *matrix(visit, column, tables)

    grid = tpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(visits),
        grid=tuple(sizes[n] for n in order),
        in_specs=[
            block((tiles.rows, inner), lambda visit, column, tables: (tables.source[visit], 0)),
            block((None, None, *tile), of_layer),
            block((None, tile[0] // BLOCK, tile[1]), matrix),
        ],
        out_specs=block((tiles.rows, tiles.columns), lambda visit, column, tables: (tables.target[visit], column)),
        scratch_shapes=[tpu.VMEM(tile, jnp.bfloat16)] if kept else [],
    )
    return pallas.pallas_call(
        functools.partial(_kernel, transposed=transposed, tile=tiles.rows, interpret=interpret),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((result_rows, columns), rows.dtype),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vector_memory_bytes
        ),
        cost_estimate=stated(cost),
        interpret=interpret,
        name="coded_product",
    )(*visits, rows, codes, scale)


def stated(cost: KernelCost) -> pallas.CostEstimate:
    """Return what a kernel states. It has no field for vector operations: audits count several for a transcendental."""
    return pallas.CostEstimate(
        flops=int(cost.flops),
        transcendentals=int(cost.vector_ops / VECTOR_OPS),
        bytes_accessed=int(cost.moved_bytes),
    )


def _kernel(
    layer: Any, group: Any, source: Any, target: Any, first: Any, end: Any, count: Any, rows: Any, codes: Any,
    scale: Any, out: Any, *kept: Any, transposed: bool, tile: int, interpret: bool,
) -> None:  # fmt: skip
    visit = pallas.program_id(1 if kept else 0)
    for decoded in kept:

        @pallas.when((visit == 0) | (group[visit] != group[jnp.maximum(visit - 1, 0)]))
        def _(decoded: Any = decoded) -> None:
            decoded[...] = _decoded(codes, scale, interpret=interpret)

    @pallas.when(visit < count[0])
    def _() -> None:
        matrix = kept[0][...] if kept else _decoded(codes, scale, interpret=interpret)
        contracted = (((1,), (1 if transposed else 0,)), ((), ()))
        found = lax.dot_general(rows[...], matrix, contracted, preferred_element_type=jnp.float32)
        if kept:  # keep the rows of other visits to this tile
            row = target[visit] * tile + lax.broadcasted_iota(jnp.int32, found.shape, 0)
            found = jnp.where((row >= first[visit]) & (row < end[visit]), found, out[...].astype(jnp.float32))
        out[...] = found.astype(out.dtype)


def _decoded(codes: Any, scale: Any, *, interpret: bool) -> Any:
    return decoded_tile(codes[...], tpu.bitcast(scale[...], jnp.uint8), interpret=interpret)
