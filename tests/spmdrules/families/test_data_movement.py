"""The table of operators that move elements by position."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autoshard import _compat
from autoshard.spmdrules.core.rule_builder import RuleBuilder
from autoshard.spmdrules.families.data_movement import common_factors
from tests.spmdrules.rows import Row, exists, f32, keys, of

X = f32(4, 8)
_MOVED = "linear 0; moves 0"
_BOTH = "linear 0 1; moves 0 1"


def _reshape(*shape):
    return lambda x: lax.reshape(x, shape)


def _bind(name):
    primitive = _compat.primitive(name)
    return lambda *operands, **params: primitive.bind(*operands, **params)  # type: ignore[union-attr]


def _iota(dtype, dimension=1):
    return lambda: lax.broadcasted_iota(dtype, (4, 8), dimension)


ROWS = [
    Row("transpose", lambda x: jnp.transpose(x, (2, 0, 1)), (f32(4, 8, 12),), f"a b c -> c a b; {_MOVED}"),
    Row("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8, 4), (1,)), (f32(8),), f"b -> a b c; {_MOVED}"),
    Row("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (4, 8)), (f32(4, 1),), f"a 1 -> a b; {_MOVED}", "a column"),
    Row("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (4, 8)), (f32(),), f"[] -> a b; {_MOVED}", "a scalar"),
    Row("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (0, 8)), (f32(8),),
        f"b -> a b; whole a; {_MOVED}", "nothing"),
    Row("squeeze", lambda x: lax.squeeze(x, (1,)), (f32(4, 1, 8),), f"a 1 b -> a b; {_MOVED}"),
    Row("reshape", _reshape(32), (f32(4, 8),), f"a b -> (a b); {_MOVED}; where a=4 b=8", "merge"),
    Row("reshape", _reshape(4, 8), (f32(32),), f"(a b) -> a b; {_MOVED}; where a=4 b=8", "split"),
    Row("reshape", _reshape(32, 4), (f32(4, 8, 4),), f"a b c -> (a b) c; {_MOVED}; where a=4 b=8", "tokens"),
    Row("reshape", _reshape(4, 4, 4, 4), (f32(4, 4, 16),), f"a b (c d) -> a b c d; {_MOVED}; where c=4 d=4", "heads"),
    Row("reshape", _reshape(8, 8), (f32(4, 16),), f"a (b c) -> (a b) c; {_MOVED}; where a=4 b=2 c=8", "both"),
    Row("reshape", _reshape(4, 1, 8), (X,), f"a b -> a 1 b; {_MOVED}", "with a one"),
    Row("reshape", _reshape(4, 2), (f32(1, 8),), f"1 (a b) -> a b; {_MOVED}; where a=4 b=2", "from a one"),
    Row("reshape", _reshape(8, 3), (f32(6, 4),),
        f"(a w) w1 -> (a w2) w3; whole w w1 w2 w3; {_MOVED}; where a=2 w=3 w2=4", "in no common factors"),
    Row("reshape", _reshape(3, 2, 4, 5, 3), (f32(2, 3, 4, 3, 5),),
        f"w w1 a w2 w3 -> w4 w5 a w6 w7; whole w w1 w2 w3 w4 w5 w6 w7; {_MOVED}", "common in the middle"),
    Row("reshape", lambda x: lax.reshape(x, (32, 4), (2, 0, 1)), (f32(8, 4, 4),),
        f"b c a -> (a b) c; {_MOVED}; where b=8 a=4", "permuted"),
    Row("reshape", _reshape(3, 0), (f32(0, 4),), f"w w1 -> w2 w3; whole w w1 w2 w3; {_MOVED}", "nothing"),
    Row("reshape", _reshape(1), (f32(),), f"[] -> 1; {_MOVED}", "a scalar"),
    Row("concatenate", lambda x, y: jnp.concatenate([x, y], 1), (X, f32(4, 4)),
        f"a w, a w1 -> a w2; whole w w1 w2; {_BOTH}"),
    Row("concatenate", lambda x, y: jnp.concatenate([y, x, y], 1), (X, f32(4, 0)),
        "a w, a b, a w1 -> a b; whole w w1; linear 0 1 2; moves 0 1 2", "with nothing"),
    Row("concatenate", lambda x: jnp.concatenate([x, x], 1), (f32(4, 0),),
        f"a w, a w1 -> a w2; whole w w1 w2; {_BOTH}", "of nothing"),
    Row("split", lambda x: lax.split(x, (3, 5), 1), (X,), f"a w -> a w1, a w2; whole w w1 w2; {_MOVED}"),
    Row("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 2, 1))), (X, f32()),
        f"a w, [] -> a w1; whole w w1; {_BOTH}"),
    Row("pad", lambda x, v: lax.pad(x, v, ((0, -2, 0), (0, 0, 0))), (X, f32()),
        "w a, [] -> w1 a; whole w w1; linear 0; linear 0 1; moves 0", "negative"),
    Row("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 2, 3))), (X, f32()),
        f"a t, [] -> a (t x); whole x; {_BOTH}; where t=8 x=4", "between elements and at both ends"),
    Row("pad", lambda x, v: lax.pad(x, v, ((-1, 2, 1), (0, 0, 0))), (X, f32()),
        f"w a, [] -> w1 a; whole w w1; {_BOTH}", "moved"),
    Row("rev", lambda x: lax.rev(x, (1,)), (X,), f"a w -> a w; whole w; {_MOVED}"),
    Row("slice", lambda x: x[:, 2:7], (X,), f"a w -> a w1; whole w w1; {_MOVED}"),
    Row("slice", lambda x: x[:, 1::2], (X,), f"a (t x) -> a t; whole x; {_MOVED}; where t=4 x=2", "every other"),
    Row("slice", lambda x: x[:, 1:6:2], (X,), f"a w -> a w1; whole w w1; {_MOVED}", "strided"),
    Row("slice", lambda x: lax.slice(x, (1, 0), (2, 8)), (X,), f"w a -> 1 a; whole w; {_MOVED}", "one row"),
    Row("slice", lambda x: x[:1], (of(jnp.int32, 2, 8),), f"w a -> 1 a; whole w; {_MOVED}", "first of two integers"),
    Row("iota", _iota(jnp.int32), (), "-> a b; offset b"),
    Row("iota", _iota(jnp.bfloat16, 0), (), "-> a b; offset a", "of floats"),
    Row("iota", lambda: lax.broadcasted_iota(jnp.int32, (4, 1), 1), (), "-> a 1", "of one"),
    *(Row("empty", lambda: lax.empty((4, 8), jnp.float32), (), "-> a b") for _ in range(exists("empty"))),
    *(Row("empty2", lambda: _bind("empty2")(dtype=np.dtype(np.float32), memory_space=jax.memory.Space.Device), (),
          "-> []")
      for _ in range(exists("empty2"))),
    *(Row("stack", lambda x, y: _bind("stack")(x, y, axis=1), (X, X), f"a b, a b -> a w b; whole w; {_BOTH}")
      for _ in range(exists("stack"))),
    *(Row("unstack", lambda x: _bind("unstack")(x, axis=1), (f32(8, 3),), f"a w -> a, a, a; whole w; {_MOVED}")
      for _ in range(exists("unstack"))),
    *(Row("unstack", lambda k: _bind("unstack")(k, axis=0), (keys(3),), f"w -> [], [], []; whole w; {_MOVED}", "keys")
      for _ in range(exists("unstack"))),
    *(Row("tile", lambda x: _bind("tile")(x, reps=(1, 4)), (X,), f"a b -> a (r b); {_MOVED}; where b=8 r=4")
      for _ in range(exists("tile"))),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


_SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=4)


@given(_SIZES, st.randoms(use_true_random=False))
def test_common_factors_multiply_to_both_shapes_and_keep_their_order(old, random):
    primes = [p for n in old for p in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}[n]]
    random.shuffle(primes)
    low, high = sorted(random.choices(range(len(primes) + 1), k=2))
    new = [math.prod(part) for part in (primes[:low], primes[low:high], primes[high:])]
    build = RuleBuilder()
    left, right = common_factors(build, old, new)
    for shape, dims in ((old, left), (new, right)):
        assert [math.prod(build.factors[f].size or 0 for f in dim) for dim in dims] == list(shape)
    shared = [[f for f in itertools.chain(*dims) if build.factors[f].kind == "pass"] for dims in (left, right)]
    assert shared[0] == shared[1]


@pytest.mark.parametrize(("old", "new"), [((4, 8, 2), (32, 2)), ((64,), (4, 4, 4)), ((2, 8), (4, 4))])
def test_shapes_with_nested_factors_have_no_whole_factor(old, new):
    build = RuleBuilder()
    common_factors(build, old, new)
    assert all(f.kind == "pass" for f in build.factors.values())


def test_merged_factors_are_where_reshape_puts_them():
    rule = Row("reshape", _reshape(8, 8), (f32(4, 16),), "", "").rule()
    assert [tuple(rule.factor(f).size for f in dim) for dim in rule.results[0]] == [(4, 2), (8,)]
    x = np.arange(64).reshape(4, 2, 8)
    assert (x[:, 1].reshape(4, 8) == jax.device_get(x.reshape(8, 8)[1::2])).all()
