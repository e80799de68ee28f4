"""The table of operators for the host or the compiler."""

import jax
import pytest
from jax import lax

from tests.spmdrules.rows import Row, bind, f32

X = f32(4, 8)


def _ignore(*_):
    return None


def _printed(**options):
    def fn(x):
        jax.debug.print("{}", x, **options)
        return x

    return fn


def _called(**options):
    def fn(x, y):
        jax.debug.callback(_ignore, x, y, **options)
        return x

    return fn


def _by_platform(x):
    return lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x * 2)


ROWS = [
    Row("debug_callback", _called(), (X, f32(4)), "w w1, w2 ->; whole w w1 w2"),
    Row("debug_callback", _called(partitioned=True), (X, f32(4)), "a b, c ->", "partitioned"),
    Row("debug_print", _printed(), (X,), "w w1 ->; whole w w1"),
    Row("debug_print", _printed(partitioned=True), (X,), "a b ->", "partitioned"),
    Row("inspect_sharding", lambda x: jax.debug.inspect_array_sharding(x, callback=_ignore), (X,), "a b ->"),
    Row("dce_sink", lambda x: bind("dce_sink")(x, prevent_mlir_dce=False), (X,), "a b ->"),
    Row("platform_index", _by_platform, (X,), "-> []"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected
