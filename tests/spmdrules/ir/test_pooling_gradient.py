"""The gradient of sum pooling becomes one operator: same values, sharded along space without communication."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.sharding.oracle.partitioner_check import _COLLECTIVE
from autoshard.spmdrules.core.placement import Placement
from autoshard.spmdrules.ir.program import build
from tests.spmdrules.rows import f32, numbers
from tests.spmdrules.simulate import simulate


def _pool(window, stride, padding="VALID"):
    return lambda x: lax.reduce_window(x, 0.0, lax.add, (1, window, 1), (1, stride, 1), padding)


def _gradient(*options):
    pool = _pool(*options)
    return lambda x, g: jax.vjp(pool, x)[1](g)[0]


def _operators(fn, *args):
    return [op for op in build(jax.make_jaxpr(fn)(*args)).ops() if op.name in ("pad", "reduce_window_sum")]


X, WINDOWS = numbers(4, 8, 3), numbers(4, 4, 3)


def test_padding_is_fused_into_the_window_sum_that_alone_uses_it():
    ops = _operators(_gradient(2, 2), X, WINDOWS)
    rules = [str(op.rule) for op in ops if op.operands != (0,)]  # the pooling itself takes the first argument
    assert rules == ["a t b -> a (t x) b; whole x; linear 0; where t=4 x=2"]


@pytest.mark.few(5)
@pytest.mark.parametrize("sharded", [0, 1])
@pytest.mark.parametrize(("window", "stride", "count"), [(2, 2, 4), (1, 2, 4), (3, 4, 2), (3, 1, 6), (4, 2, 3)])
def test_values_are_kept(window, stride, count, sharded):
    fn, g = _gradient(window, stride), WINDOWS[:, :1].repeat(count, 1) * np.arange(1, count + 1)[:, None]
    spec = tuple(("data",) if d == sharded else () for d in range(3))
    placements = [Placement(spec if x.shape[sharded] % 2 == 0 else ((), (), ())) for x in (X, g)]
    (actual,) = simulate(fn, (X, g), placements, {"data": 2})
    np.testing.assert_allclose(actual, fn(X, g), 1e-5)


def _used_twice(x):
    padded = lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 1), (0, 0, 0)))
    return padded, _pool(2, 1)(padded)


NOT_FUSED = {
    "used twice": _used_twice,
    "not of zeros": lambda x: _pool(2, 1)(lax.pad(x, 1.0, ((0, 0, 0), (1, 1, 1), (0, 0, 0)))),
    "by an argument": lambda x: _pool(2, 1)(lax.pad(x, x[0, 0, 0], ((0, 0, 0), (1, 1, 1), (0, 0, 0)))),
    "negative": lambda x: _pool(2, 1)(lax.pad(x, 0.0, ((0, 0, 0), (-1, 2, 1), (0, 0, 0)))),
    "of padded windows": lambda x: _pool(3, 2, "SAME")(lax.pad(x, 0.0, ((0, 0, 0), (1, 1, 1), (0, 0, 0)))),
}


@pytest.mark.parametrize("fn", NOT_FUSED.values(), ids=NOT_FUSED)
def test_other_padding_is_not_fused(fn):
    assert [op.name for op in _operators(fn, f32(4, 8, 3))] == ["pad", "reduce_window_sum"]


@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
def test_sharded_space_moves_nothing():
    fn = _gradient(2, 2)
    planned = plan(fn, X, WINDOWS, mesh={"space": 4}, fixed={"0": P(None, "space"), "1": P(None, "space")})
    jitted = planned.jit(jax.devices()[:4])
    np.testing.assert_allclose(jitted(X, WINDOWS), fn(X, WINDOWS), 1e-6)
    text = jitted.lower(X, WINDOWS).compile().as_text()
    assert not [m["op"] for m in _COLLECTIVE.finditer(text or "")]
