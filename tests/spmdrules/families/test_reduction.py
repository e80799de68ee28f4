"""The table of reductions and of operators that run along a dimension."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.spmdrules.rows import Row, f32, of

X = f32(4, 8)
INTS = of(jnp.int32, 4, 8)
B = of(jnp.bool_, 4, 8)


def _fold(x, y):
    return lax.reduce(
        (x, y), (jnp.float32(1), jnp.float32(0)), lambda a, b: (a[0] * b[0] + 1, a[1] - b[1] * a[0]), (1,)
    )


ROWS = [
    Row("reduce_sum", lambda x: jnp.sum(x, 1), (X,), "a r -> a; reduce r; linear 0"),
    Row("reduce_sum", jnp.sum, (X,), "r r1 -> []; reduce r r1; linear 0", "of all"),
    Row("reduce_sum", lambda x: jnp.sum(x, (0, 2)), (f32(4, 8, 1),), "r a 1 -> a; reduce r; linear 0", "of one"),
    Row("reduce_sum", lambda x: jnp.sum(x, 0), (f32(0, 8),), "r a -> a; whole r; linear 0", "of nothing"),
    Row("reduce_max", lambda x: jnp.max(x, 0), (X,), "r a -> a; reduce r:max"),
    Row("reduce_min", lambda x: jnp.min(x, 1), (X,), "a r -> a; reduce r:min"),
    Row("reduce_prod", lambda x: jnp.prod(x, 1), (X,), "a r -> a; reduce r:mul"),
    Row("reduce_and", lambda x: jnp.all(x, 1), (B,), "a r -> a; reduce r:and"),
    Row("reduce_or", lambda x: jnp.any(x, 1), (B,), "a r -> a; reduce r:or"),
    Row("reduce_xor", lambda x: jnp.bitwise_xor.reduce(x, axis=1), (INTS,), "a r -> a; reduce r:xor"),
    Row("argmax", lambda x: jnp.argmax(x, 1), (X,), "a r -> a; reduce r:argmax"),
    Row("argmin", lambda x: jnp.argmin(x, 0), (X,), "r a -> a; reduce r:argmin"),
    Row("reduce", _fold, (X, X), "a w, a w, [], [] -> a, a; whole w"),
    Row("cumsum", lambda x: lax.cumsum(x, 1), (X,), "a w -> a w; whole w; linear 0"),
    Row("cumprod", lambda x: lax.cumprod(x, 0), (X,), "w a -> w a; whole w"),
    Row("cummax", lambda x: lax.cummax(x, 1), (X,), "a w -> a w; whole w"),
    Row("cummin", lambda x: lax.cummin(x, 1, reverse=True), (X,), "a w -> a w; whole w"),
    Row("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), (X,), "a w -> a w; whole w"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected
