"""The table of random keys and bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.spmdrules import Shard
from tests.spmdrules.rows import Row, below, bind, exists, f32, keys

_MULHI = "it uses mulhi, which XLA cannot parse in a program for several devices"
WORDS = below(1000, 8, dtype=np.uint32)


ROWS = [
    Row("random_bits", lambda k: jax.random.bits(k, (4, 8)), (keys(),), "[] -> a b; offset a b"),
    Row("random_bits", lambda k: jax.vmap(jax.random.uniform)(k), (keys(4),), "k -> k", "of keys"),
    Row("random_bits", lambda k: jax.vmap(lambda k: jax.random.bits(k, (8,)))(k), (keys(4),),
        "k -> k a; offset a", "of each key"),
    Row("random_split", lambda k: jax.random.split(k, 4), (keys(),), "[] -> a; offset a"),
    Row("random_seed", lambda x: jax.vmap(jax.random.key)(x), (WORDS,), "a -> a"),
    Row("random_wrap", jax.random.wrap_key_data, (below(1000, 4, 2, dtype=np.uint32),), "a w -> a; whole w"),
    Row("random_unwrap", jax.random.key_data, (keys(4),), "a -> a w; whole w"),
    Row("random_fold_in", lambda k, x: jax.vmap(jax.random.fold_in, (None, 0))(k, x), (keys(), WORDS), "[], a -> a"),
    Row("random_gamma", lambda k, a: bind("random_gamma")(k, a, log_space=True), (keys(4), f32(4, 2)),
        "k, k w -> k w; whole w"),
    Row("threefry2x32", lambda *x: bind("threefry2x32")(*x), (WORDS, WORDS, WORDS, WORDS), "a, a, a, a -> a, a"),
    Row("threefry4x32", lambda *x: bind("threefry4x32")(*x), (WORDS,) * 8,
        "a, a, a, a, a, a, a, a -> a, a, a, a"),
    Row("philox2x32", lambda *x: bind("philox2x32")(*x), (WORDS,) * 3, "a, a, a -> a, a",
        unpartitioned=_MULHI),
    Row("philox4x32", lambda *x: bind("philox4x32")(*x), (np.uint32(3), np.uint32(5), *(WORDS,) * 4),
        "[], [], a, a, a, a -> a, a, a, a", unpartitioned=_MULHI),
    Row("random_clone", lambda k: jax.random.clone(k), (keys(4),), "a -> a"),
    Row("iota_2x32_shape", lambda: bind("iota_2x32_shape")(shape=(4, 8)), (), "-> a b, a b; offset a b"),
    Row("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (4, 8)), (below(1000, 4, dtype=np.uint32),),
        "w -> w, a b; whole w; offset a b"),
    *(Row("rng_uniform", lambda: lax.rng_uniform(jnp.float32(0), jnp.float32(1), (4,)), (), "[], [] -> w; whole w")
      for _ in range(exists("rng_uniform"))),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


def test_a_shard_has_its_slice_of_the_global_bits():
    row = ROWS[0]
    rule, expected = row.rule(), np.asarray(row.fn(keys()))
    assert rule.body is not None
    for i in range(2):
        for j in range(4):
            part = rule.body(Shard(rule, {"a": 2, "b": 4}, {"a": i, "b": j}), keys())
            np.testing.assert_array_equal(part, expected[2 * i : 2 * i + 2, 2 * j : 2 * j + 2])
