"""Batched gathers and scatters in place of those with an index 0, 1, 2, ...: same values, no communication."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.sharding.oracle.partitioner_check import _COLLECTIVE
from autoshard.spmdrules.core.placement import Placement
from autoshard.spmdrules.ir.program import build
from tests.spmdrules.rows import below, numbers
from tests.spmdrules.simulate import simulate

BATCH, ROWS, WIDTH = 4, 8, 6
X = numbers(BATCH, ROWS, WIDTH)
PICKED = below(ROWS, BATCH, 2)
COUNTED = np.arange(BATCH)


def _squared(fn):
    return lambda x, i: jax.grad(lambda x: (fn(x, i) ** 2).sum())(x)


def _picked(x, i):
    return x[jnp.arange(BATCH)[:, None], i]


def _one_each(x, i):
    return x[jnp.arange(BATCH), i[:, 0]]


def _scanned(x, i):
    return lax.scan(lambda total, column: (total + _one_each(x, column[:, None]).sum(), None), 0.0, i.T)[0]


@dataclass(frozen=True)
class Indexing:
    """A function that indexes `X` by `PICKED`.

    Attributes:
        note: what is particular about it.
        fn: takes `x` and the index.
        batches: for each gather and scatter, the batching dimensions of its operand and of its indices.
    """

    note: str
    fn: Callable[[Any, Any], Any]
    batches: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


_FIRST = ((0,), (0,))
_NONE = ((), ())
COMMON = [
    Indexing("rows", _picked, (_FIRST,)),
    Indexing("one each", _one_each, (_FIRST,)),
    Indexing("gradient", _squared(_picked), (_FIRST, _FIRST)),
    Indexing("of numpy", lambda x, i: x[COUNTED[:, None], i], (_FIRST,)),
    Indexing("closed over", lambda x, i: x[jnp.asarray(COUNTED)[:, None], i], (_FIRST,)),
    Indexing("along a diagonal", lambda x, i: x[jnp.arange(BATCH), jnp.arange(BATCH), i[:, 0] % WIDTH], (_FIRST,)),
]  # fmt: skip
CASES = [
    *COMMON,
    Indexing("set", lambda x, i: x.at[jnp.arange(BATCH), i[:, 0]].set(1.0), (_FIRST,)),
    Indexing("multiplied", lambda x, i: x.at[jnp.arange(BATCH), i[:, 0]].multiply(2.0), (_FIRST,)),
    Indexing("last dimension", lambda x, i: x[i[:, :1] % BATCH, :, jnp.arange(WIDTH)], (((2,), (1,)),)),
    Indexing("two of three", lambda x, i: x[jnp.arange(BATCH)[:, None, None], jnp.arange(ROWS)[:, None], i[:, None]],
             (((0, 1), (0, 1)),)),
    Indexing("all but the middle", lambda x, i: x[jnp.ix_(jnp.arange(BATCH), i[0], jnp.arange(WIDTH))],
             (((0, 2), (0, 2)),)),
    Indexing("reshaped", lambda x, i: x[jnp.arange(BATCH).reshape(1, BATCH, 1)[0], i], (_FIRST,)),
    Indexing("by arithmetic", lambda x, i: x[jnp.minimum(jnp.arange(BATCH) * 2 - jnp.arange(BATCH), 9)[:, None], i],
             (_FIRST,)),
    Indexing("in a call", lambda x, i: jax.jit(_picked)(x, i), (_FIRST,)),
    Indexing("in a loop", _scanned, (_FIRST,)),
    Indexing("batched already", lambda x, i: jnp.take_along_axis(x[:, :, 0], i, 1), (_FIRST,)),
    Indexing("backwards", lambda x, i: x[BATCH - 1 - jnp.arange(BATCH)[:, None], i], (_NONE,)),
    Indexing("moved", lambda x, i: x[jnp.arange(BATCH)[:, None] - 1, i], (_NONE,)),
    Indexing("some of them", lambda x, i: x[jnp.arange(2)[:, None], i[:2]], (_NONE,)),
    Indexing("by an argument", lambda x, i: x[i[:, :1] * 0 + jnp.arange(BATCH)[:, None], i], (_NONE,)),
    Indexing("nothing else", lambda x, i: x[jnp.arange(BATCH)], (_NONE,)),
    Indexing("windows", lambda x, i: lax.gather(
        x, jnp.stack([jnp.arange(BATCH), i[:, 0]], 1),
        lax.GatherDimensionNumbers((1, 2), (1,), (0, 1)), (1, 1, WIDTH), mode="clip"), (_NONE,)),
]  # fmt: skip


def _operators(fn, *args):
    ops = build(jax.make_jaxpr(fn)(*args)).ops()
    return [op for op in ops if op.name == "gather" or op.name.startswith("scatter")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.note.replace(" ", "_"))
def test_an_index_component_that_is_an_iota_becomes_a_batching_dimension(case):
    numbers = [op.eqn.params["dimension_numbers"] for op in _operators(case.fn, X, PICKED)]
    along = [getattr(n, "start_indices_batching_dims", None) or getattr(n, "scatter_indices_batching_dims", ())
             for n in numbers]  # fmt: skip
    assert tuple(zip((n.operand_batching_dims for n in numbers), along, strict=True)) == case.batches


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [c for c in CASES if c not in COMMON], ids=lambda case: case.note.replace(" ", "_"))
def test_values_are_kept(case):
    placements = [Placement((("data",), *[()] * (x.ndim - 1))) for x in (X, PICKED)]
    (actual,) = simulate(case.fn, (X, PICKED), placements, {"data": 2})
    np.testing.assert_allclose(actual, case.fn(jnp.asarray(X), PICKED), 1e-5)


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
@pytest.mark.parametrize("case", COMMON, ids=lambda case: case.note.replace(" ", "_"))
def test_a_sharded_batch_moves_nothing(case):
    planned = plan(case.fn, X, PICKED, mesh={"data": 4}, fixed={"0": P("data"), "1": P("data")})
    jitted = planned.jit(jax.devices()[:4])
    np.testing.assert_allclose(jitted(X, PICKED), case.fn(jnp.asarray(X), PICKED), 1e-6)
    text = jitted.lower(X, PICKED).compile().as_text()
    assert not [m["op"] for m in _COLLECTIVE.finditer(text or "")]


def test_index_flags_that_remain_valid_are_kept():
    (op,) = _operators(lambda x, i: x.at[jnp.arange(BATCH), i].set(1.0, unique_indices=True, indices_are_sorted=True),
                       jnp.asarray(X), PICKED[:, 0])  # fmt: skip
    assert op.eqn.params["unique_indices"] and not op.eqn.params["indices_are_sorted"]
