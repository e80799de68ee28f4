"""`attention`: comparison with an explicit softmax and between its implementations, and the memory of each."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import autoshard
from autoshard.kernels.constants import BLOCKWISE_KEYS
from autoshard.models.attention import attention
from autoshard.models.workloads import workload
from autoshard.train.program.build import workload_step
from tests.models.small import quickly

MASKS = {"none": None, "keys": (2, 1, 1, True), "heads": (1, 4, True, True), "rows": (1, 1, True, 1)}


@partial(jax.jit, static_argnames=("causal", "impl", "block_size", "window", "soft_cap"))
def run(q, k, v, mask=None, **options):
    return attention(q, k, v, mask=mask, **options)


def qkv(seed, seq, keys=None, *, batch=2, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32):
    keys = seq if keys is None else keys
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(a, (batch, seq, heads, head_dim), dtype)
    k = jax.random.normal(b, (batch, keys, kv_heads, head_dim), dtype)
    return q, k, jax.random.normal(c, k.shape, dtype)


def make_mask(kind, seq, keys):
    """Makes a mask of half of the pairs. For `rows`, the mask of every second row is empty."""
    if MASKS[kind] is None:
        return None
    shape = tuple(n if flag is True else flag for flag, n in zip(MASKS[kind], (2, 4, seq, keys), strict=True))
    if kind == "rows":
        return (jnp.arange(seq) % 2 == 0).reshape(shape)
    return jax.random.bernoulli(jax.random.key(9), 0.5, shape)


def explicit_attention(q, k, v, causal, mask):
    """Computes attention in loops over batch, heads and rows, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, seq, heads, head_dim = q.shape
    group = heads // k.shape[2]
    visible = np.ones((batch, heads, seq, k.shape[1]), bool)
    if mask is not None:
        visible &= np.asarray(mask)
    if causal:
        visible &= np.tril(np.ones((seq, k.shape[1]), bool))
    out = np.zeros_like(q)
    for b, h, i in np.ndindex(batch, heads, seq):
        chosen = visible[b, h, i]
        if chosen.any():
            scores = k[b, chosen, h // group] @ q[b, i, h] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights @ v[b, chosen, h // group] / weights.sum()
    return out


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl, block", [("plain", 512), ("blockwise", 3), ("blockwise", 512)])
def test_matches_an_explicit_softmax(impl, block, causal, kind):
    q, k, v = qkv(0, 8)
    mask = make_mask(kind, 8, 8)
    out = run(q, k, v, mask, causal=causal, impl=impl, block_size=block)
    np.testing.assert_allclose(out, explicit_attention(q, k, v, causal, mask), atol=2e-6)


def explicit_scores(q, k, *, window, causal, soft_cap, segments):
    """Computes scores in float64, -inf where a query does not see a key."""
    seq, group = q.shape[1], q.shape[2] // k.shape[2]
    scores = np.einsum("bshd,bthd->bhst", *(np.asarray(x, np.float64) for x in (q, np.repeat(k, group, 2))))
    scores = scores / np.sqrt(q.shape[-1])
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    distance = np.arange(seq)[:, None] - np.arange(seq)
    visible = (distance >= 0) if causal else np.ones((seq, seq), bool)
    if window is not None:
        visible = visible & (np.abs(distance) < window)
    visible = np.broadcast_to(visible, scores.shape)
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    return np.where(visible, scores, -np.inf)


@pytest.mark.few(2)
@pytest.mark.parametrize("impl", ["plain", "blockwise", "splash"])
@pytest.mark.parametrize("window, causal, soft_cap, has_segments, has_sinks", [
    (3, True, None, False, False), (2, False, None, False, True), (None, True, 1.5, True, False),
    (None, False, None, True, True), (5, True, 0.5, True, True),
])  # fmt: skip
def test_windows_caps_segments_and_sinks_match_an_explicit_softmax(
    impl, window, causal, soft_cap, has_segments, has_sinks
):
    seq = 128 if impl == "splash" else 9
    q, k, v = qkv(11, seq)
    segments = np.stack([np.arange(seq) // 4, np.arange(seq) // 3]) if has_segments else None
    sinks = np.array([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    scores = explicit_scores(q, k, window=window, causal=causal, soft_cap=soft_cap, segments=segments)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[None, :, None, None])
    expected = np.einsum("bhst,bthd->bshd", weights / total, np.repeat(np.asarray(v), 2, 2))
    out = run(
        q, k, v, causal=causal, impl=impl, block_size=4, window=window, soft_cap=soft_cap,
        segment_ids=None if segments is None else jnp.asarray(segments),
        sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32),
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, atol=3e-6)


CALLS: dict[str, Any] = dict(
    seq=st.integers(1, 17),
    keys=st.integers(1, 17),
    block=st.integers(1, 20),
    kv_heads=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["none", "keys", "heads", "rows"]),
    causal=st.booleans(),
)


@settings(max_examples=3)
@given(**CALLS)
def test_blockwise_equals_plain_with_gradients(**call):
    check_blockwise(**call)


@pytest.mark.slow
@settings(max_examples=8)
@given(**CALLS)
def test_blockwise_equals_plain_with_gradients_in_more_calls(**call):
    check_blockwise(**call)


def check_blockwise(seq, keys, block, kv_heads, kind, causal):
    keys = seq if causal else keys
    operands = qkv(1, seq, keys, kv_heads=kv_heads)
    mask = make_mask(kind, seq, keys)
    weight = jax.random.normal(jax.random.key(2), operands[0].shape)

    def value_and_grads(impl):
        def total(*qkv):
            return jnp.sum(weight * attention(*qkv, causal=causal, impl=impl, block_size=block, mask=mask))

        return quickly(jax.value_and_grad(total, argnums=(0, 1, 2)), *operands)

    (plain, plain_grads), (blockwise, blockwise_grads) = (
        value_and_grads("plain"),
        value_and_grads("blockwise"),
    )
    np.testing.assert_allclose(blockwise, plain, rtol=1e-5, atol=1e-5)
    for a, b in zip(blockwise_grads, plain_grads, strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


def test_gradients_match_finite_differences():
    q, k, v = qkv(3, 5, batch=1, head_dim=4)
    weight = jax.random.normal(jax.random.key(4), q.shape)
    for impl in ("plain", "blockwise"):

        def total(q, k, v, impl=impl):
            return jnp.sum(weight * run(q, k, v, causal=True, impl=impl, block_size=2))

        check_grads(jax.jit(total), (q, k, v), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("impl", ["plain", "blockwise"])
def test_grouped_heads_equal_repeated_ones(impl):
    q, k, v = qkv(5, 6, heads=6, kv_heads=2)
    grouped = run(q, k, v, causal=True, impl=impl, block_size=4)
    repeated = run(q, jnp.repeat(k, 3, 2), jnp.repeat(v, 3, 2), causal=True, impl=impl, block_size=4)
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)


@pytest.mark.parametrize("impl", ["plain", "blockwise"])
def test_large_scores_and_bfloat16_stay_finite(impl):
    q, k, v = qkv(6, 8, dtype=jnp.bfloat16)

    def total(q, k, v):
        out = attention(100 * q, 100 * k, v, causal=True, impl=impl, block_size=3)
        assert out.dtype == jnp.bfloat16
        return jnp.sum(out.astype(jnp.float32))

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    for grad in grads:
        assert grad.dtype == jnp.bfloat16 and bool(jnp.all(jnp.isfinite(grad)))


def compiled_temp_bytes(fn, *shapes):
    analysis = jax.jit(fn).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def temp_bytes(impl, seq, *, grad=True):
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv(0, 1, batch=1, heads=2, head_dim=8))
    q, k, v = (jax.ShapeDtypeStruct((1, seq, *x.shape[2:]), x.dtype) for x in (q, k, v))

    def total(q, k, v):
        return jnp.sum(attention(q, k, v, causal=True, impl=impl, block_size=128))

    fn = jax.grad(total, argnums=(0, 1, 2)) if grad else total
    return compiled_temp_bytes(fn, q, k, v)


@pytest.mark.parametrize("grad", [False, True])
def test_blockwise_memory_is_linear_and_plain_is_quadratic(grad):
    blockwise = [temp_bytes("blockwise", seq, grad=grad) for seq in (1024, 4096)]
    plain = [temp_bytes("plain", seq, grad=grad) for seq in (1024, 4096)]
    assert blockwise[1] < 5 * blockwise[0]
    assert plain[1] > 8 * plain[0]
    assert blockwise[1] < plain[1] / 8


def test_blockwise_memory_stays_linear_under_a_layers_remat_policy():
    """A policy that saves dots without a batch dimension must not save the scores of a block."""

    def temp(seq):
        x = jax.ShapeDtypeStruct((1, seq, 16), jnp.float32)
        w = jax.ShapeDtypeStruct((3, 16, 2, 8), jnp.float32)

        def layer(x, w):
            q, k, v = jnp.einsum("bse,nehd->nbshd", x, w)
            return jnp.sum(attention(q, k, v, causal=True, impl="blockwise", block_size=128))

        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        return compiled_temp_bytes(jax.grad(layer, argnums=(0, 1)), x, w)

    assert temp(4096) < 5 * temp(1024)


def test_auto_depends_on_the_number_of_keys():
    def scans(keys):
        q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv(0, 1, keys, batch=1))
        return "scan" in str(jax.make_jaxpr(lambda *qkv: attention(*qkv, causal=False))(q, k, v))

    assert scans(BLOCKWISE_KEYS) and not scans(BLOCKWISE_KEYS - 1)


def test_scale_replaces_the_default():
    q, k, v = qkv(7, 4)
    explicit = attention(q, k, v, causal=True, scale=8**-0.5)
    np.testing.assert_array_equal(explicit, attention(q, k, v, causal=True))
    uniform = attention(q, k, v, causal=False, scale=0.0)
    np.testing.assert_allclose(uniform[:, 0, 0], jnp.mean(v, axis=1)[:, 0], atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 3}, "3 query heads are not a multiple of 2 kv heads"),
        ({"keys": 5}, "causal=True needs as many keys as queries"),
        ({"impl": "flash"}, "choose one of auto, plain, blockwise, splash, cudnn"),
        ({"window": 0}, "window is 0; it must be a whole number, at least 1"),
        ({"window": 2.5}, "window is 2.5; it must be a whole number, at least 1"),
        ({"segment_ids": ["a", "b"]}, r"segment_ids are \(str, str\); pass one integer array"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be a finite number above 0"),
        ({"dropout": 0.1}, "no implementation drops attention weights"),
        ({"sinks": jnp.ones(3)}, r"sinks \(3,\) must be \[heads\] = \(4,\)"),
        ({"segment_ids": jnp.ones((2, 4))}, "segment_ids must be integers"),
        ({"segment_ids": jnp.ones((2, 3), int)}, r"segment_ids must be integers of queries \(2, 4\)"),
        ({"block_size": 0}, "at least 1"),
        ({"impl": "fast"}, "impl is 'fast'; choose one of "),
        ({"mask": jnp.ones((2, 1, 4, 4))}, "mask must be boolean"),
        ({"mask": jnp.ones((2, 3, 4, 4), bool)}, "where each dimension may be 1"),
        ({"mask": jnp.ones((4, 4), bool)}, "where each dimension may be 1"),
    ],
)
def test_invalid_arguments_are_errors(change, message):
    shape = {name: change.pop(name) for name in ("heads", "keys") if name in change}
    with pytest.raises(ValueError, match=message):
        attention(*qkv(0, 4, **shape), causal=True, **change)


def test_k_and_v_must_match():
    q, k, v = qkv(0, 4)
    with pytest.raises(ValueError, match="both"):
        attention(q, k, v[:, :2], causal=True)
    with pytest.raises(ValueError, match="agree in batch"):
        attention(q[:1], k, v, causal=True)


def test_cudnn_takes_16_bits_and_no_mask():
    q, k, v = qkv(0, 8, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="cudnn takes no mask array here"):
        attention(q, k, v, causal=True, impl="cudnn", mask=jnp.ones((1, 1, 8, 8), bool))
    with pytest.raises(ValueError, match="cudnn takes q, k and v in bfloat16 or float16, not float32"):
        attention(*qkv(0, 8), causal=True, impl="cudnn")


@pytest.mark.parametrize("window", [None, 3])
def test_cudnn_runs_in_plain_jax_elsewhere(window):
    operands = qkv(0, 16, dtype=jnp.bfloat16)

    def total(impl, *operands):
        return jnp.sum(attention(*operands, causal=True, impl=impl, window=window).astype(jnp.float32) ** 2)

    found, expected = (
        jax.jit(jax.value_and_grad(total, (1, 2, 3)), static_argnums=0)(impl, *operands)
        for impl in ("cudnn", "blockwise")
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.02, atol=0.02), found, expected)


def test_a_gpu_gets_cudnns_kernels():
    """Lowered for a GPU, the program calls cuDNN; for a CPU it does not. Nothing asks for an attached GPU."""
    operands = qkv(0, 64, dtype=jnp.bfloat16)
    step = jax.jit(jax.grad(lambda *x: jnp.sum(attention(*x, causal=True, impl="cudnn").astype(jnp.float32))))
    text = {p: step.trace(*operands).lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu")}
    for part in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert part in text["cuda"] and part not in text["cpu"]


def test_cudnn_is_sharded_over_batch_and_heads():
    """The kernel and its gradient are planned as on a GPU, and no operand is gathered."""
    work = workload("llama-tiny").with_(attention="cudnn", dtype="bfloat16", kv_heads=4, batch_size=16)
    plan = autoshard.plan(*workload_step(work), target="h100:1x8", plan="dp:2 tp:4", donate_argnums=0)
    assert plan.traffic and not [row for row in plan.traffic if "attention.py" in row[3]]
    assert not plan.notes, plan.notes
