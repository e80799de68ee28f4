"""The table of operators on sliding windows."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard import _compat
from autoshard.spmdrules.families.window import window_count
from tests.spmdrules.rows import Row, bind, f32, of

X = f32(4, 8, 4)
_SLID = "a w c -> a t c; whole w t"


def _window(x, init, op, padding="SAME", size=3, stride=1):
    return lax.reduce_window(x, init, op, (1, size, 1), (1, stride, 1), padding)


def _dilated(size, stride, padding):
    """Sums of windows over elements with a zero between any two."""
    around = ((0, 0), padding, (0, 0))
    return lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, size, 1), (1, stride, 1), around, base_dilation=(1, 2, 1)
    )  # fmt: skip


def _own(x):
    return _window(x, 1.0, lambda a, b: a * b + 0.5 * a + 0.1)


def _larger(x, i):
    def larger(a, b):
        return tuple(lax.select(a[0] >= b[0], p, q) for p, q in zip(a, b, strict=True))

    return lax.reduce_window((x, i), (-jnp.inf, 0), larger, (1, 3, 1), (1, 1, 1), "SAME")


def _mixed(a, b):
    return a * b + 0.5 * a * a + 0.1


def _scattered(x, source, window=3):
    """Sends each element of `source` to the smallest element of its window, where they are combined by `_mixed`."""
    scalars = jnp.float32(0), jnp.float32(0)
    select, scatter = (_compat.open_jaxpr(jax.make_jaxpr(op)(*scalars)) for op in (lax.le, _mixed))
    low = (window - 1) // 2
    return bind("select_and_scatter")(
        x, source, jnp.float32(1.5), select_jaxpr=select, select_consts=(), scatter_jaxpr=scatter, scatter_consts=(),
        window_dimensions=(1, window, 1), window_strides=(1, 2, 1), padding=((0, 0), (low, window - 2 - low), (0, 0)),
    )  # fmt: skip


def _max_pool(x):
    return _window(x, -jnp.inf, lax.max).sum()


ROWS = [
    Row("reduce_window_sum", lambda x: _window(x, 0.0, lax.add), (X,),
        "a w b -> a t b; whole w t; linear 0"),
    Row("reduce_window_sum", lambda x: _window(x, 0.0, lax.add, "VALID", 2, 2), (X,),
        "a (t x) b -> a t b; whole x; linear 0; where t=4 x=2", "of parts"),
    Row("reduce_window_sum", lambda x: _window(x, 0.0, lax.add, "VALID", 3, 4), (f32(4, 16, 4),),
        "a (t x) b -> a t b; whole x; linear 0; where t=4 x=4", "of parts with gaps"),
    Row("reduce_window_sum", _dilated(2, 1, (1, 1)), (X,),
        "a t b -> a (t x) b; whole x; linear 0; where t=8 x=2", "into parts"),
    Row("reduce_window_sum", _dilated(3, 2, (1, 1)), (X,), "a b c -> a b c; linear 0", "of one each"),
    Row("reduce_window_sum", _dilated(2, 1, (0, 2)), (X,), "a w b -> a t b; whole w t; linear 0", "into parts, moved"),
    Row("reduce_window_max", lambda x: _window(x, -jnp.inf, lax.max), (X,), "a w b -> a t b; whole w t"),
    Row("reduce_window_max", lambda x: _window(x, -jnp.inf, lax.max, "VALID", 2, 2), (X,),
        "a (t x) b -> a t b; whole x; where t=4 x=2", "of parts"),
    Row("reduce_window_min", lambda x: _window(x, jnp.inf, lax.min, "VALID"), (X,), "a w b -> a t b; whole w t"),
    Row("reduce_window", _own, (X,), "a w b, [] -> a t b; whole w t"),
    Row("select_and_scatter", _scattered, (X, f32(4, 4, 4)), "a w b, a t b, [] -> a w b; whole w t"),
    Row("select_and_scatter", functools.partial(_scattered, window=2), (X, f32(4, 4, 4)),
        "a (t x) b, a t b, [] -> a (t x) b; whole x; where t=4 x=2", "of parts"),
    Row("reduce_window", _larger, (X, of(jnp.int32, 4, 8, 4)),
        "a w b, a w b, [], [] -> a t b, a t b; whole w t", "of two arrays"),
    Row("select_and_scatter_add", jax.grad(_max_pool), (X,), "a t b, a w b -> a w b; whole t w; linear 0"),
    Row("select_and_gather_add", lambda x: jax.jvp(_max_pool, (x,), (x,)), (X,),
        "a w b, a w b -> a t b; whole w t; linear 0"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "base", "dilation"),
    [(8, 3, 1, (1, 1), 1, 1), (8, 2, 2, (0, 0), 1, 1), (7, 3, 2, (1, 0), 2, 2),
     (2, 5, 1, (0, 0), 1, 1), (0, 1, 1, (2, 2), 1, 1)],
)  # fmt: skip
def test_window_count_agrees_with_jax(size, window, stride, padding, base, dilation):
    result = jax.eval_shape(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (window,), (stride,), (padding,), (base,), (dilation,)),
        f32(size),
    )
    assert window_count(size, window, stride, padding, base, dilation) == result.shape[0]
