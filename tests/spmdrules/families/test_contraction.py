"""The table of matrix products and convolutions."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmdrules.rows import Row, f32, of

_PRODUCT = "reduce k; linear 0; linear 1"
_GROUPS = np.array([3, 1, 0, 4], np.int32)


def _dot(numbers):
    return lambda x, y: lax.dot_general(x, y, numbers)


def _conv(groups=1, strides=(1, 1), padding: Any = "SAME", layout=("NHWC", "HWIO", "NHWC"), batch_groups=1):
    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=layout, feature_group_count=groups,
            batch_group_count=batch_groups,
        )  # fmt: skip

    return conv


def _gradient(windows, strides):
    """The convolution in the gradient of a convolution with windows that do not overlap."""
    edges = [(window - 1, stride - 1) for window, stride in zip(windows, strides, strict=True)]

    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), edges, lhs_dilation=strides, dimension_numbers=("NHWC", "HWOI", "NHWC")
        )

    return conv


def _ragged(contracting, ragged, group, batch=((), ())):
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


def _scaled(x, y, x_scale, y_scale):
    narrow, scales = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    return lax.scaled_dot(
        x.astype(narrow), y.astype(narrow), lhs_scale=None if x_scale is None else x_scale.astype(scales),
        rhs_scale=None if y_scale is None else y_scale.astype(scales), preferred_element_type=jnp.float32,
    )  # fmt: skip


_SCALED = [
    (_scaled, (f32(4, 8, 64), f32(4, 64, 4), f32(4, 8, 2), f32(4, 2, 4)),
     "b m (k x), b (k x) n, b m k, b k n -> b m n; reduce k x; where k=2 x=32", ""),
    (_scaled, (f32(8, 64), f32(64, 4), f32(8, 2), f32(4, 4)),
     "m (k k1 x), (k k1 x) n, m k, (k k1) n -> m n; reduce k k1 x; where k=2 k1=2 x=16",
     "of other blocks"),
    (lambda x, y, s: _scaled(x, y, s, None), (f32(8, 64), f32(64, 4), f32(8, 2)),
     "m (k x), (k x) n, m k, 1 n -> m n; reduce k x; where k=2 x=32", "of one operand"),
]  # fmt: skip


ROWS = [
    Row("dot_general", jnp.matmul, (f32(4, 8), f32(8, 12)), f"m k, k n -> m n; {_PRODUCT}"),
    Row("dot_general", jnp.matmul, (f32(4, 8, 4), f32(4, 4, 12)), f"b m k, b k n -> b m n; {_PRODUCT}", "batched"),
    Row("dot_general", _dot((((0, 2), (1, 0)), ((), ()))), (f32(4, 8, 4), f32(4, 4, 12)),
        "k m k1, k1 k n -> m n; reduce k k1; linear 0; linear 1", "over two"),
    Row("dot_general", lambda q, k: jnp.einsum("bshd,bthd->bhst", q, k), (f32(4, 8, 4, 4), f32(4, 12, 4, 4)),
        f"b m b1 k, b n b1 k -> b b1 m n; {_PRODUCT}", "attention"),
    Row("dot_general", _dot((((), ()), ((), ()))), (f32(4), f32(8)), "m, n -> m n; linear 0; linear 1", "outer"),
    Row("dot_general", jnp.dot, (f32(8), f32(8)), f"k, k -> []; {_PRODUCT}", "inner"),
    Row("dot_general", jnp.matmul, (f32(4, 0), f32(0, 8)), "m k, k n -> m n; whole k; linear 0; linear 1", "nothing"),
    Row("dot_general", lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32),
        (of(jnp.bfloat16, 4, 8), of(jnp.bfloat16, 8, 4)), f"m k, k n -> m n; {_PRODUCT}", "bf16"),
    Row("ragged_dot_general", lax.ragged_dot, (f32(8, 4), f32(4, 4, 12), _GROUPS),
        "m k, v k n, w -> m n; reduce k; whole w; index v; offset m; linear 0; linear 1"),
    Row("ragged_dot_general", _ragged(((0,), (0,)), (0,), ()), (f32(8, 4), f32(8, 12), _GROUPS),
        "k m, k n, w -> v m n; reduce k; whole w; offset v; linear 0; linear 1", "summed"),
    Row("ragged_dot_general", _ragged(((1,), (2,)), (0,), (0,)), (f32(8, 4), f32(4, 12, 4), _GROUPS),
        "m k, v n k, w -> m n; reduce k; whole w; index v; offset m; linear 0; linear 1", "transposed"),
    Row("ragged_dot_general", _ragged(((2,), (1,)), (0,), (), batch=((0,), (0,))),
        (f32(8, 6, 4), f32(8, 4, 12), _GROUPS), "b m k, b k n, a -> b m n; reduce k; linear 0; linear 1",
        "of a batch"),
    Row("ragged_dot_general", _ragged(((2,), (2,)), (1,), (1,), batch=((0,), (0,))),
        (f32(2, 8, 4), f32(2, 4, 4, 12), np.stack([_GROUPS, _GROUPS[::-1]])),
        "b m k, b v k n, b w -> b m n; reduce k; whole w; index v; offset m; linear 0; linear 1", "batched"),
    Row("ragged_dot_general", _ragged(((1,), (1,)), (1,), (), batch=((0,), (0,))),
        (f32(2, 8, 4), f32(2, 8, 12), np.stack([_GROUPS, _GROUPS[::-1]])),
        "b k m, b k n, b w -> v b m n; reduce k; whole w; offset v; linear 0; linear 1", "summed, batched"),
    Row("ragged_dot_general", _ragged(((2,), (1,)), (1,), (0,)),
        (f32(2, 8, 4), f32(4, 4, 12), np.stack([_GROUPS, _GROUPS[::-1]])),
        "m1 m k, v k n, m1 w -> m1 m n; reduce k; whole w; index v; offset m; linear 0; linear 1", "of two rows"),
    *(Row("scaled_dot", fn, args, expected, note) for fn, args, expected, note in _SCALED),
    Row("conv_general_dilated", _conv(strides=(1,), layout=("NCH", "OIH", "NCH")), (f32(4, 4, 6), f32(8, 4, 3)),
        "n c s, o c x -> n o t; reduce c; whole s x t; linear 0; linear 1", "in one dimension"),
    Row("conv_general_dilated", _conv(), (f32(4, 6, 6, 4), f32(3, 3, 4, 8)),
        "n s s1 c, x x1 c o -> n t t1 o; reduce c; whole s s1 x x1 t t1; linear 0; linear 1"),
    Row("conv_general_dilated", _conv(strides=(1,), layout=("NCH", "OIH", "NCH")), (f32(4, 4, 6), f32(8, 4, 3)),
        "n c s, o c x -> n o t; reduce c; whole s x t; linear 0; linear 1", "in one dimension"),
    Row("conv_general_dilated", lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", rhs_dilation=(3,)),
        (f32(4, 4, 12), f32(8, 4, 4)),
        "n c (r x), o c r -> n o x; reduce c r; whole x; linear 0; linear 1; where r=4 x=3", "kernel of patches"),
    Row("conv_general_dilated", _conv(), (f32(4, 6, 6, 4), f32(1, 1, 4, 8)),
        "n a b c, 1 1 c o -> n a b o; reduce c; linear 0; linear 1", "1 x 1"),
    Row("conv_general_dilated", _conv(strides=(2, 2), padding="VALID"), (f32(4, 8, 8, 3), f32(2, 2, 3, 8)),
        "n (t x) (t1 x1) c, x x1 c o -> n t t1 o; reduce c; whole x x1; linear 0; linear 1; where t=4 x=2 t1=4 x1=2",
        "patches"),
    Row("conv_general_dilated", _gradient((2, 3), (2, 4)), (f32(4, 4, 4, 8), f32(2, 3, 4, 8)),
        "n t t1 c, x1 x3 o c -> n (t x) (t1 x2) o; reduce c; whole x1 x3 x x2; linear 0; linear 1; "
        "where t=4 t1=4 x=2 x2=4", "gradient of patches"),
    Row("conv_general_dilated", _gradient((1, 1), (2, 2)), (f32(4, 4, 4, 8), f32(1, 1, 4, 8)),
        "n t t1 c, 1 1 o c -> n (t x) (t1 x1) o; reduce c; whole x x1; linear 0; linear 1; "
        "where t=4 t1=4 x=2 x1=2", "gradient of some pixels"),
    Row("conv_general_dilated", _conv(strides=(2, 2)), (f32(4, 8, 8, 4), f32(1, 1, 4, 8)),
        "n (t x) (t1 x1) c, 1 1 c o -> n t t1 o; reduce c; whole x x1; linear 0; linear 1; where t=4 x=2 t1=4 x1=2",
        "some pixels"),
    Row("conv_general_dilated", _conv(padding="VALID"), (f32(4, 8, 6, 4), f32(8, 3, 4, 8)),
        "n r s c, r x c o -> n 1 t o; reduce r c; whole s x t; linear 0; linear 1", "over a whole dimension"),
    Row("conv_general_dilated", _conv(padding=((0, 0), (0, 1))), (f32(4, 8, 6, 4), f32(8, 6, 4, 8)),
        "n r s c, r x c o -> n 1 t o; reduce r c; whole s x t; linear 0; linear 1", "over more than one"),
    Row("conv_general_dilated", _conv(groups=8), (f32(4, 6, 6, 8), f32(3, 3, 1, 8)),
        "n s s1 g, x x1 1 g -> n t t1 g; whole s s1 x x1 t t1; linear 0; linear 1", "depthwise"),
    Row("conv_general_dilated", _conv(groups=4), (f32(4, 6, 6, 8), f32(3, 3, 2, 16)),
        "n s s1 (g c), x x1 c (g o) -> n t t1 (g o); reduce c; whole s s1 x x1 t t1; linear 0; linear 1; "
        "where g=4 c=2 o=4", "grouped"),
    Row("conv_general_dilated", _conv(batch_groups=4), (f32(8, 6, 6, 3), f32(3, 3, 3, 16)),
        "(g n) s s1 c, x x1 c (g o) -> n t t1 (g o); reduce c; whole s s1 x x1 t t1; linear 0; linear 1; "
        "where g=4 n=2 o=4", "batch groups"),
    Row("conv_general_dilated", _conv(strides=(2, 1)), (f32(4, 8, 6, 4), f32(3, 3, 4, 8)),
        "n s s1 c, x x1 c o -> n t t1 o; reduce c; whole s s1 x x1 t t1; linear 0; linear 1", "strided"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


def test_a_kernel_shards_a_spatial_dimension_only_by_the_major_factor_of_the_image():
    for row in ROWS:
        if row.primitive == "conv_general_dilated":
            rule, numbers = row.rule(), row.equation().params["dimension_numbers"]
            spatial = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
            shardable = [(d, f) for d, k in spatial for f in rule.operands[1][k] if rule.factor(f).kind != "whole"]
            assert all(f == rule.operands[0][d][0] for d, f in shardable), row.id
