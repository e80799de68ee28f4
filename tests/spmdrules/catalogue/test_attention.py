"""Compares the variants of attention with each other, and position encodings with their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.spmdrules.catalogue import attention as module
from autoshard.spmdrules.propagation.propagate import propagate
from tests.arrays import array
from tests.spmdrules.catalogue.compiled import compiled
from tests.spmdrules.jitted import jitted

attention = compiled(module)
pytestmark = pytest.mark.usefixtures("strict_numerics")
RNG = np.random.default_rng(0)
Q, K, V = (array(RNG.normal(size=(2, 12, 4, 8)), jnp.float32) for _ in range(3))
BEFORE = np.tril(np.ones((12, 12), bool))


def assert_close(a, b, tolerance=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


@jitted
def reference(q, k, v, visible=None, change=lambda scores: scores):
    """Attention by its definition, with scores of minus infinity for keys that are not visible."""
    scores = change(jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1]).astype(np.float32))
    scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)


def test_masks():
    assert_close(jitted(attention.attention)(Q, K, V), reference(Q, K, V))
    visible = jnp.asarray(BEFORE)[None, None]
    assert_close(jitted(attention.causal_attention)(Q, K, V), reference(Q, K, V, visible))
    near = visible & ~jnp.asarray(np.tril(np.ones((12, 12), bool), -5))[None, None]
    assert_close(jitted(attention.sliding_window_attention)(Q, K, V, window=4), reference(Q, K, V, near))
    lengths = jnp.asarray([3, 12], jnp.int32)
    short = (jnp.arange(12)[None] < lengths[:, None])[:, None, None]
    assert_close(jitted(attention.padded_attention)(Q, K, V, lengths), reference(Q, K, V, short))
    assert_close(
        jitted(attention.soft_capped_attention)(Q, K, V, cap=2.0),
        reference(Q, K, V, change=lambda s: 2 * jnp.tanh(s / 2)),
    )
    bias = array(RNG.normal(size=(1, 4, 12, 12)), jnp.float32)
    assert_close(
        jitted(attention.attention)(Q, K, V, bias),
        reference(Q, K, V, change=lambda s: s + jnp.broadcast_to(bias, s.shape)),
    )


def test_blockwise_attention_equals_causal_attention_with_its_gradient():
    @functools.partial(jax.jit, static_argnums=0)
    def run(fn):
        out, pull = jax.vjp(fn, Q, K, V)
        return out, pull(V)

    assert_close(run(lambda *x: attention.blockwise_attention(*x, block=4)), run(attention.causal_attention), 1e-4)


def test_groups_of_queries_share_keys():
    k, v = K[:, :, :2], V[:, :, :2]
    assert_close(
        jitted(attention.causal_attention)(Q, k, v),
        jitted(attention.causal_attention)(Q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)),
    )


def test_a_sink_is_a_key_whose_value_is_zero():
    sinks = jnp.asarray([0.5, -1, 2, 0])
    extra = jnp.broadcast_to(sinks.reshape(1, 4, 1, 1), (2, 4, 12, 1))
    scores = jnp.concatenate([jnp.einsum("bshd,bthd->bhst", Q, K) / np.float32(np.sqrt(8)), extra], -1)
    expected = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1)[..., :-1], V)
    assert_close(jitted(attention.attention_with_sinks)(Q, K, V, sinks), expected)


def test_linear_attention_equals_its_quadratic_form():
    q, k = jax.nn.elu(Q) + 1, jax.nn.elu(K) + 1
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    expected = jnp.einsum("bhst,bthd->bshd", scores / scores.sum(-1, keepdims=True), V)
    assert_close(jitted(attention.linear_attention)(Q, K, V), expected)


def test_decoding_with_a_cache_gives_the_last_row():
    caches = jitted(attention.kv_cache_update)(jnp.zeros_like(K), jnp.zeros_like(V), K[:, :11], V[:, :11], jnp.int32(0))
    positions = jnp.asarray([11, 11], jnp.int32)
    k, v = (jitted(attention.ragged_cache_update)(c, x[:, 11], positions) for c, x in zip(caches, (K, V), strict=True))
    assert_close(
        jitted(attention.decode_attention)(Q[:, 11], k, v, positions + 1),
        jitted(attention.causal_attention)(Q, K, V)[:, 11],
    )
    table = jnp.asarray([[4, 1, 3], [0, 5, 2]], jnp.int32)
    k, v = (jnp.zeros((6, 4, 4, 8)).at[table].set(x.reshape(2, 3, 4, 4, 8)) for x in (K, V))
    assert_close(
        jitted(attention.paged_attention)(Q[:, 11], k, v, table, positions + 1),
        jitted(attention.causal_attention)(Q, K, V)[:, 11],
    )


@pytest.mark.parametrize("rope", [attention.rope, attention.rope_interleaved])
def test_rotated_scores_depend_only_on_distance(rope):
    rope = jitted(rope)
    positions = array(RNG.integers(0, 50, (2, 12)), jnp.int32)
    scores = [jnp.einsum("bshd,bthd->bhst", rope(Q, at), rope(K, at)) for at in (positions, positions + 100)]
    assert_close(scores[0], scores[1], 1e-3)
    assert_close(jnp.linalg.norm(rope(Q, positions), axis=-1), jnp.linalg.norm(Q, axis=-1))


def test_the_two_rope_conventions_differ_in_the_order_of_pairs():
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
    order = np.arange(8).reshape(4, 2).T.reshape(-1)  # even indices first
    assert_close(
        jitted(attention.rope)(Q[..., order], positions), jitted(attention.rope_interleaved)(Q, positions)[..., order]
    )
    pair = jnp.asarray([[[[1.0, 0.0]]]])
    angle = np.float32(3.0)
    assert_close(
        jitted(attention.rope)(pair, jnp.full((1, 1), 3, jnp.int32))[0, 0, 0],
        np.asarray([np.cos(angle), np.sin(angle)]),
    )


def test_alibi_has_the_slopes_of_the_paper():
    bias = jitted(attention.alibi)(jnp.zeros((1, 8, 4, 4)))
    assert_close(bias[0, :, 3, 2], -(2.0 ** -np.arange(1, 9, dtype=np.float32)))
    assert_close(bias[0, 0, 3, 0], np.float32(-1.5))


def test_relative_buckets_are_those_of_t5():
    table = jnp.broadcast_to(jnp.arange(16, dtype=jnp.float32)[:, None], (16, 1))
    bias = jitted(attention.relative_position_bias)(table, seq=40, farthest=16)[0, 0]
    # Distances 0 to 3 have one bucket each. Distances from 4 share four buckets, whose ranges grow by sqrt(2).
    assert_close(bias[39, 39 - np.arange(20)], [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7])
    assert_close(bias[0, 1:5], [9, 10, 11, 12])


def test_sharded_batch_and_heads_move_nothing_and_a_sharded_sequence_gathers_keys():
    for spec in (P("data"), P(None, None, "data")):
        propagation = propagate(attention.causal_attention, Q, K, V, in_specs=spec, mesh={"data": 2})
        assert not propagation.reshards and propagation.out_specs == spec
    propagation = propagate(attention.causal_attention, Q, K, V, in_specs=P(None, "data"), mesh={"data": 2})
    assert propagation.out_specs == P(None, "data")
    assert propagation.bytes_moved == 0.5 * (K.nbytes + V.nbytes) and {r.kind for r in propagation.reshards} == {
        "all-gather"
    }


@pytest.mark.parametrize("name, specs", [
    ("swiglu", (P(), P(None, "tp"), P(None, "tp"), P("tp"))),
    ("multi_head_attention", (P(), *(P(None, "tp"),) * 3, P("tp"))),
])  # fmt: skip
def test_one_reduction_per_tensor_parallel_layer(name, specs):
    operator = next(op for op in attention.OPERATORS if op.name == name)
    propagation = propagate(operator.fn, *operator.args, in_specs=specs, mesh={"tp": 4})
    assert not propagation.reshards and propagation.out_partial == {"tp": "sum"}
    gradient = operator.gradient
    assert gradient is not None
    propagation = propagate(gradient.fn, *gradient.args, in_specs=(*specs, P()), mesh={"tp": 4})
    assert (
        not propagation.reshards
        and propagation.out_partial[0] == {"tp": "sum"}
        and propagation.out_specs[1:] == specs[1:]
    )
