"""Tile sizes of grouped products, and what they cost."""

import jax
import pytest

from autoshard.kernels.constants import TRITON_REACHED
from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.cost import gradient_cost, product_cost
from autoshard.kernels.grouped.tiles import Shape, Tiles, gradient_tiles, padded_rows, product_tiles, tiled_rows

MIB = 2**20


def shapes(*dims_and_dtypes):
    return [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in dims_and_dtypes]


def product(rows, inner, columns, own, groups=8):
    return shapes(
        ((rows, inner), "bfloat16"),
        ((own, inner, columns), "bfloat16"),
        ((groups,), "int32"),
        ((own,), "int32"),
        ((rows,), "int32"),
    )


def test_a_matrix_is_read_once_only_by_tiles_with_all_inner_elements():
    shape = Shape(rows=1024, inner=512, columns=256, groups=4, itemsize=2)
    weights, visits = 2 * 512 * 256, 1024 // 128 + 3
    rows = 2 * visits * 128 * (512 + 256)  # read and written
    assert shape.visits(128) == visits
    assert shape.product_bytes(Tiles(128, 512, 256)) == rows + 4 * weights
    assert shape.product_bytes(Tiles(128, 256, 256)) == rows + visits * weights
    assert shape.steps(Tiles(128, 256, 128)) == visits * 4


@pytest.mark.parametrize("mib", [16, 64])
@pytest.mark.parametrize("inner, columns", [(4096, 14336), (14336, 4096), (96, 200), (2048, 1408)])
def test_tiles_fit_the_vector_memory_and_more_of_it_saves_traffic(mib, inner, columns):
    shape = Shape(16384, inner, columns, 8, 2)
    for choose in (product_tiles, gradient_tiles):
        tiles = choose(shape, 16384, mib * MIB)
        blocks = tiles.rows * tiles.inner + tiles.inner * tiles.columns + tiles.rows * tiles.columns
        assert 16384 % tiles.rows == 0 and 4 * blocks <= mib * MIB
        assert all(size % 128 == 0 or size in (inner, columns) for size in tiles)
    assert shape.product_bytes(product_tiles(shape, 16384, 64 * MIB)) <= shape.product_bytes(
        product_tiles(shape, 16384, 16 * MIB)
    )


def test_rows_are_padded_to_the_smallest_tile():
    assert [padded_rows(n) for n in (1, 128, 129)] == [128, 128, 256]
    assert product_tiles(Shape(300, 64, 64, 2, 4), 300, 16 * MIB).rows == 128


def test_tiles_in_plain_jax_are_about_as_large_as_a_group():
    assert [tiled_rows(rows, 8) for rows in (3, 96, 8192, 10**6)] == [1, 16, 1024, 1024]


@pytest.mark.parametrize("call", [GroupedCall("megablox"), GroupedCall("triton"), GroupedCall("tiled")])
def test_a_device_pays_for_the_rows_of_its_own_groups(call):
    """Balanced routing: with 2 of 8 groups, a quarter of the rows, and one tile that both groups share."""
    (whole,), (part,) = (product_cost(*product(2**16, 1024, 2048, own), call=call) for own in (8, 2))
    ideal = 2.0 * 2**16 * 1024 * 2048
    assert ideal <= whole.flops <= 1.2 * ideal
    assert ideal / 4 <= part.flops <= 1.2 * ideal / 4
    assert part.moved_bytes < whole.moved_bytes / 3


def test_the_gradient_of_matrices_costs_the_rows_once():
    rows, weights, *groups = product(2**16, 1024, 2048, 8)
    (d_out,) = shapes(((2**16, 2048), "bfloat16"))
    (kernel,), (tiled,) = (
        gradient_cost(rows, d_out, *groups, call=GroupedCall(name, 32 * MIB)) for name in ("megablox", "tiled")
    )
    ideal = 2.0 * 2**16 * 1024 * 2048
    assert ideal <= kernel.flops <= 1.2 * ideal and kernel.vector_ops > 0 == kernel.held_bytes
    assert tiled.held_bytes == 4 * 8 * 1024 * 2048  # sums in float32
    assert weights.size * 2 < kernel.moved_bytes


def test_a_loop_over_tiles_on_a_gpu_pays_for_waits_launches_and_copies():
    """Counted by hand for 4 tiles of 1024 rows, which 2 groups share: 5 visits."""
    rows, weights, *groups = product(4096, 256, 512, 2, groups=2)
    (d_out,) = shapes(((4096, 512), "bfloat16"))
    call = GroupedCall("tiled", launches=True)
    whole, copies = product_cost(rows, weights, *groups, call=call)
    assert (whole,) == product_cost(rows, weights, *groups, call=GroupedCall("tiled"))
    assert copies.moved_bytes == 5 * 2 * (2 * 1024 * 256 + 2 * 256 * 512 + 3 * 1024 * 512) and not copies.flops
    assert copies.overhead_us == pytest.approx(5 * (18.2 + 7 * 1.4))
    whole, copies = gradient_cost(rows, d_out, *groups, call=call)
    added = 4 * 256 * 512  # bytes of a gradient in float32
    assert copies.moved_bytes == 5 * (2 * 2 * 1024 * (256 + 512) + 5 * added)
    assert copies.overhead_us == pytest.approx(5 * (18.2 + 8 * 1.4)) and whole.held_bytes == 2 * added


def test_a_triton_kernel_pads_each_group_to_its_blocks():
    rows, weights, *groups = product(4096, 256, 512, 2, groups=2)
    (d_out,) = shapes(((4096, 512), "bfloat16"))
    (cost,) = product_cost(rows, weights, *groups, call=GroupedCall("triton"))
    assert cost.flops == 2 * (32 + 1) * 128 * 256 * 512 and cost.efficiency == TRITON_REACHED
    (gradient,) = gradient_cost(rows, d_out, *groups, call=GroupedCall("triton"))
    assert gradient.flops == 2 * (64 + 1) * 64 * 256 * 512 and gradient.held_bytes == 0
    odd = product(4096, 24, 512, 2, groups=2)  # no block divides 24: plain JAX
    loop = GroupedCall("tiled", launches=True)
    assert product_cost(*odd, call=GroupedCall("triton")) == product_cost(*odd, call=loop)
