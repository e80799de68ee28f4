"""Products with 4-bit codes: values and gradients are those of decoded matrices, on shards, too."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas

from autoshard.kernels.grouped.call import GroupedCall
from autoshard.kernels.grouped.codes import products
from autoshard.kernels.grouped.codes.cost import CodedShape, coded_cost, coded_tiles
from autoshard.kernels.grouped.codes.decoding import decoded_tile
from autoshard.kernels.grouped.codes.products import coded_grouped_product, coded_product_of_all, reads_codes
from autoshard.sharding.oracle.rule_check import check_rule
from tests.arrays import array

KERNEL, ELSEWHERE = GroupedCall("megablox", interpret=True), GroupedCall("megablox")


def drawn(groups, inner, columns):
    """Returns codes of three layers. Of the second layer: its scales, its number, and its matrices in float32."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (3, groups, inner, columns), np.uint8).view(ml_dtypes.float4_e2m1fn)
    scale = rng.integers(124, 130, (groups, inner // 32, columns), np.uint8).view(ml_dtypes.float8_e8m0fnu)
    values = codes[1].astype(np.float32) * scale.astype(np.float32).repeat(32, axis=1)
    return (jnp.asarray(codes), jnp.asarray(scale), jnp.array([1], jnp.int32)), values


def rows_of(*shape, seed=1):
    return array(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def assert_near(found, right):
    error = np.linalg.norm(np.asarray(found, np.float64) - right)
    assert found.shape == right.shape and error <= 4e-3 * np.linalg.norm(right)  # one rounding to bfloat16


def test_each_code_with_each_scale_has_its_exact_value():
    codes = np.tile(np.arange(16, dtype=np.uint8).repeat(2)[:, None], (1, 256)).view(ml_dtypes.float4_e2m1fn)
    scale = np.arange(256, dtype=np.uint8)[None]

    def kernel(codes, scale, out):
        out[...] = decoded_tile(codes[...], scale[...], interpret=True)

    found = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((32, 256), jnp.bfloat16), interpret=True)(
        jnp.asarray(codes), jnp.asarray(scale)
    )
    found, right = np.asarray(found, np.float64), codes.astype(np.float64) * np.exp2(scale.astype(np.float64) - 127)
    np.testing.assert_array_equal(found[:, 2:245], right[:, 2:245])
    assert np.isnan(found[:, 245:]).all()
    normal = np.abs(right) >= 2.0**-126  # smaller numbers of bfloat16 are zeros on TPUs
    np.testing.assert_array_equal(found[:, :2][normal[:, :2]], right[:, :2][normal[:, :2]])


# rows, inner elements, columns, group sizes
CASES = {
    "sizes that divide no tile": (300, 96, 200, (100, 0, 57, 80)),
    "one group has all rows": (64, 128, 128, (0, 64, 0)),
    "few rows": (5, 32, 40, (1, 2, 0, 1)),
    "no rows in any group": (20, 32, 16, (0, 0)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("call", [KERNEL, ELSEWHERE], ids=["kernel", "plain JAX"])
@pytest.mark.parametrize("case", [*CASES])
def test_values_and_gradients_are_those_of_each_group(case, call):
    count, inner, columns, sizes = CASES[case]
    coded, values = drawn(len(sizes), inner, columns)
    rows, d_out = rows_of(count, inner), rows_of(count, columns, seed=2)

    @jax.jit
    def run(rows, d_out, coded):
        own = jnp.arange(len(sizes), dtype=jnp.int32)
        product = functools.partial(coded_grouped_product, call, sizes=jnp.asarray(sizes, jnp.int32), own=own)
        out, pull = jax.vjp(lambda rows: product(rows, *coded), rows)
        return out, *pull(d_out)

    out, d_rows = np.zeros((count, columns)), np.zeros((count, inner))
    end = 0
    for group, size in enumerate(sizes):
        part = slice(end, end := end + size)
        out[part] = np.asarray(rows[part], np.float64) @ values[group]
        d_rows[part] = np.asarray(d_out[part], np.float64) @ values[group].T
    found = run(rows, d_out, coded)
    assert all(one.dtype == jnp.bfloat16 for one in found)
    assert_near(found[0], out)
    assert_near(found[1], d_rows)


@pytest.mark.few(1)
@pytest.mark.parametrize("call", [KERNEL, ELSEWHERE], ids=["kernel", "plain JAX"])
@pytest.mark.parametrize("shared", [True, False], ids=["the same rows", "rows of each group"])
def test_all_groups_at_once(shared, call):
    coded, values = drawn(3, 64, 200)
    rows = rows_of(*(() if shared else (3,)), 7, 64)
    found = jax.jit(functools.partial(coded_product_of_all, call))(rows, *coded)
    assert_near(found, np.asarray(rows, np.float64) @ values)


def test_a_tile_of_columns_is_decoded_for_each_group(monkeypatch):
    monkeypatch.setattr(products, "coded_tiles", lambda shape, _: coded_tiles(shape, 130_000))
    coded, values = drawn(3, 64, 300)
    tiles = products.coded_tiles(CodedShape(50, 64, 300, 3, "sorted"), 0)
    assert tiles is not None and tiles.columns == 128
    sizes = jnp.asarray([17, 20, 13], jnp.int32)
    found = coded_grouped_product(KERNEL, rows := rows_of(50, 64), *coded, sizes, jnp.arange(3, dtype=jnp.int32))
    group = np.repeat(np.arange(3), np.asarray(sizes))
    assert_near(found, np.einsum("mk,mkn->mn", np.asarray(rows, np.float64), values[group]))


@pytest.mark.few(1)
@pytest.mark.parametrize("operator", ["shared_rows", "own_rows", "rows", "rows_gradient"])
def test_shards_compute_their_terms(operator):
    # The operands are valid, because the oracle also runs the operator on the values that it is given.
    coded, _ = drawn(4, 64, 16)
    inner = 16 if operator == "rows_gradient" else 64
    rows = rows_of(*((4,) if operator == "own_rows" else ()), 8, inner)
    numbers = [jnp.arange(n, dtype=jnp.int32) for n in (4, 8)]
    groups = [jnp.asarray([3, 0, 2, 2], jnp.int32), *numbers] if operator.startswith("rows") else []
    call = GroupedCall("megablox", transposed=operator == "rows_gradient")
    run = functools.partial(getattr(products, f"coded_{operator}"), call=call)
    found = check_rule(run, rows, *coded, *groups, partitioner=False)
    # Plain JAX could split the codes of a scale, which the kernel takes whole.
    assert {(one.kind, one.factors) for one in found} <= {("missing", ("d",))}


def test_the_cost_counts_codes_and_scales_once():
    shape = CodedShape(32, 2880, 2880, 4, "shared")
    tiles = coded_tiles(shape, 64 * 2**20)
    assert tiles is not None
    cost = coded_cost(shape, tiles)
    matrices = 4 * 2880 * 2880 // 2 + 4 * 90 * 2880
    rows = 32 * 2880 * 2 + 4 * 32 * 2880 * 2
    assert cost.moved_bytes == matrices + rows
    assert cost.flops == 2 * 4 * 32 * 2880 * 2880


def test_which_products_read_codes():
    (codes, scale, _), _ = drawn(2, 64, 32)
    call = GroupedCall("megablox")
    assert reads_codes(call, jnp.bfloat16, codes, scale) and reads_codes(call, jnp.bfloat16, codes, scale, rows=8)
    assert not reads_codes(GroupedCall("tiled"), jnp.bfloat16, codes, scale)
    assert not reads_codes(call, jnp.float32, codes, scale)
    assert not reads_codes(call, jnp.bfloat16, codes.astype(jnp.float8_e4m3fn), scale)
    assert not reads_codes(call, jnp.bfloat16, codes, scale.astype(jnp.float32))
    assert not reads_codes(call, jnp.bfloat16, codes, scale[:, :1])
    assert not reads_codes(call, jnp.bfloat16, codes[:, :, :48], scale)
    large = jax.ShapeDtypeStruct((1, 2, 32768, 65536), "float4_e2m1fn")
    assert not reads_codes(call, jnp.bfloat16, large, jax.ShapeDtypeStruct((2, 1024, 65536), "float8_e8m0fnu"))
