"""The loss in chunks of the vocabulary: values, gradients, memory, and what its plans move."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.kernels.cross_entropy import linear_cross_entropy
from autoshard.models import cross_entropy, workload
from autoshard.train.program.build import workload_step
from tests.arrays import array

CHUNKS = 4
RNG = np.random.default_rng(0)
X = array(RNG.normal(size=(8, 5, 16)), jnp.float32)
MASK = array(RNG.uniform(size=(8, 5)) < 0.7)


def head_of(vocab, tied):
    head = jax.random.normal(jax.random.key(2), (16, vocab))
    return head.T if tied else head


def targets_of(vocab):
    """Targets of all tokens; those that the mask leaves out are no classes."""
    return jnp.where(MASK, jax.random.randint(jax.random.key(3), (8, 5), 0, vocab), -100)


def in_chunks(x, head, targets, mask, tied=False, cap=None):
    losses = linear_cross_entropy(x, head, targets, chunks=CHUNKS, vocab_axis=0 if tied else 1, soft_cap=cap)
    return jnp.sum(losses * mask.astype(losses.dtype))


def whole(x, head, targets, mask, tied=False, cap=None):
    logits = jnp.einsum("bse,ve->bsv" if tied else "bse,ev->bsv", x, head.astype(x.dtype))
    if cap is not None:
        logits = cap * jnp.tanh(logits.astype(jnp.float32) / cap)
    return cross_entropy(logits, targets, mask)[0]


def error(found, expected):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [64, 50, 7])  # 50 and 7 are padded; with 7 a chunk has one class
@pytest.mark.parametrize("cap", [None, 2.0])  # 2 is half of the typical size of a product
def test_equals_the_whole_loss(vocab, tied, cap):
    args = X, head_of(vocab, tied), targets_of(vocab), MASK, tied, cap
    value, gradients = jax.value_and_grad(in_chunks, (0, 1))(*args)
    expected, expected_gradients = jax.value_and_grad(whole, (0, 1))(*args)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for found, right in zip(gradients, expected_gradients, strict=True):
        assert found.shape == right.shape and error(found, right) < 1e-6
    assert np.all(np.asarray(gradients[0])[~np.asarray(MASK)] == 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [64, 50])
@pytest.mark.parametrize("head_dtype", [jnp.float32, jnp.bfloat16])
def test_is_at_least_as_exact_as_the_whole_loss_in_bfloat16(head_dtype, vocab, tied):
    x, head, rest = X.astype(jnp.bfloat16), head_of(vocab, tied).astype(head_dtype), (targets_of(vocab), MASK, tied)
    value, gradients = jax.value_and_grad(in_chunks, (0, 1))(x, head, *rest)
    rounded, rounded_gradients = jax.value_and_grad(whole, (0, 1))(x, head, *rest)
    exact = x.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32)
    expected, exact_gradients = jax.value_and_grad(whole, (0, 1))(*exact, *rest)
    assert abs(value - expected) <= abs(rounded - expected) and error(value, expected) < 1e-5
    for given, found, other, right in zip((x, head), gradients, rounded_gradients, exact_gradients, strict=True):
        assert found.dtype == given.dtype
        assert error(found, right) < 1.2 * error(other, right) + 1e-6


@pytest.mark.slow
def test_a_soft_cap_in_float64():
    """Values and gradients of float64 arrays are computed in float64, with classes of padding."""
    vocab = 50

    def plain(x, head):
        logits = 2.0 * jnp.tanh(x @ head / 2.0)
        labels = jnp.where(MASK, targets_of(vocab), 0)
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.sum(losses * MASK)

    with jax.enable_x64(True):
        x, head = X.astype(jnp.float64), head_of(vocab, False).astype(jnp.float64)
        found = jax.value_and_grad(in_chunks, (0, 1))(x, head, targets_of(vocab), MASK, False, 2.0)
        expected = jax.value_and_grad(plain, (0, 1))(x, head)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.dtype == jnp.float64
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_large_logits_stay_finite(tied, cap):
    def loss(x, head):
        return in_chunks(x, head, targets_of(50), MASK, tied, cap)

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(1e3 * X, head_of(50, tied))
    assert np.isfinite(value) and all(bool(jnp.all(jnp.isfinite(g))) for g in gradients)


def test_invalid_activations_make_the_loss_invalid():
    losses = linear_cross_entropy(X.at[0, 0, 0].set(jnp.nan), head_of(64, False), targets_of(64), chunks=CHUNKS)
    assert np.isnan(losses[0, 0]) and bool(jnp.all(jnp.isfinite(losses[1:])))


@pytest.mark.parametrize("target", [-1, 50, 51])  # 50 and 51 are classes of padding
def test_a_target_outside_the_vocabulary_has_the_logit_0(target):
    losses = linear_cross_entropy(X, head_of(50, False), jnp.full((8, 5), target), chunks=CHUNKS)
    logits = jnp.einsum("bse,ev->bsv", X, head_of(50, False))
    np.testing.assert_allclose(losses, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


def test_any_number_of_leading_dimensions():
    x, targets = X.reshape(40, 16), targets_of(50).reshape(40)
    flat = linear_cross_entropy(x, head_of(50, False), targets, chunks=CHUNKS)
    np.testing.assert_allclose(
        flat.reshape(8, 5), linear_cross_entropy(X, head_of(50, False), targets_of(50), chunks=CHUNKS), rtol=1e-6
    )


@pytest.mark.parametrize("vocab", [64, 50])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_promotes_nothing_implicitly(vocab, cap, strict_numerics):
    args = X.astype(jnp.bfloat16), head_of(vocab, False), targets_of(vocab), MASK
    jax.eval_shape(jax.grad(lambda *args: in_chunks(*args, cap=cap), (0, 1)), *args)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_targets_may_be_integers_of_any_size(dtype, strict_numerics):
    targets, options = targets_of(64), {"chunks": 4}
    expected = linear_cross_entropy(X, head_of(64, False), targets, **options)
    np.testing.assert_array_equal(
        linear_cross_entropy(X, head_of(64, False), targets.astype(dtype), **options), expected
    )


@pytest.mark.parametrize("chunks", [2.0, True, 0])
def test_chunks_must_be_a_positive_integer(chunks):
    with pytest.raises(ValueError, match=f"chunks is {chunks}; it must be an integer of at least 1"):
        linear_cross_entropy(X, head_of(64, False), targets_of(64), chunks=chunks)


@pytest.mark.few(1)
@pytest.mark.parametrize(("tied", "cap"), [(False, None), (True, None), (True, 2.0)])
def test_a_sharded_vocabulary_is_reduced_and_not_gathered(tied, cap, mesh_of):
    """With the vocabulary over `model`, no part of the head, of `x` or of the logits moves."""
    mesh = mesh_of(data=2, model=4)

    def sharding(*spec):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    head, rows = sharding("model") if tied else sharding(None, "model"), sharding("data")
    fn = jax.jit(
        jax.value_and_grad(lambda x, head, y, m: in_chunks(x, head, y, m, tied, cap), (0, 1)),
        in_shardings=(rows, head, rows, rows),
        out_shardings=(sharding(), (rows, head)),
    )
    args = X, head_of(64, tied), targets_of(64), MASK
    text = fn.lower(*args).compile().as_text() or ""
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    assert "all-reduce" in text
    value, gradients = fn(*args)
    expected, expected_gradients = jax.value_and_grad(whole, (0, 1))(*args, tied, cap)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for found, right in zip(gradients, expected_gradients, strict=True):
        assert error(found, right) < 1e-6


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"head \[width, vocab\].*integers of shape \(8, 5\).*chunks is 0"):
        linear_cross_entropy(X, jnp.zeros((10, 10)), MASK.astype(jnp.float32), chunks=0)
    with pytest.raises(ValueError, match="vocab_axis is 2"):
        linear_cross_entropy(X, jnp.zeros((16, 10)), targets_of(10), chunks=2, vocab_axis=2)
    with pytest.raises(ValueError, match=r"soft_cap is 0\.0; it must be a finite number above 0"):
        linear_cross_entropy(X, jnp.zeros((16, 10)), targets_of(10), chunks=2, soft_cap=0.0)


def planned(words, chunks, tied, target="cpu:8"):
    work = workload("llama-tiny").with_(batch_size=64, vocab=4096, kv_heads=8, tie_head=tied, loss_chunks=chunks)
    step, state, batch = workload_step(work)
    return autoshard.plan(step, state, batch, target=target, plan=words, donate_argnums=0)


def moved(plan):
    """The bytes that the loss moves, by collective and mesh axes, without the statistics of softmax."""
    found = defaultdict(float)
    for kind, axes, size, line in plan.traffic:
        if "cross_entropy.py" in line or "(predict)" in line or "loss.py" in line:
            found[kind, axes] += size
    return {key: size for key, size in found.items() if size > 1e5}


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", ["cpu:8", "v6e:2x4"])
def test_the_head_is_gathered_once_more_and_its_gradient_reduced_once(target, tied):
    """fsdp: the backward pass gathers each chunk of the head again. No other bytes are added."""
    before, after = (moved(planned("fsdp:8", n, tied, target)) for n in (1, CHUNKS))
    head = ("all-gather", "fsdp")
    assert set(before) == set(after) and after[head] == 2 * before[head]
    assert all(after[key] == before[key] for key in before if key != head)


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("words", ["dp:2 tp:4", "fsdp:2 tp:4"])
def test_chunks_of_a_sharded_vocabulary_are_not_resharded(words, tied):
    """tp: nothing but the gradient of `x` is reduced more often, once for each chunk."""
    before, after = (planned(words, n, tied) for n in (1, CHUNKS))
    for plan in (before, after):
        spec = plan.in_specs[0].params["embed" if tied else "head"]
        assert "tp" in spec[0 if tied else 1]
    kinds = {kind for (kind, axes) in moved(after) if "tp" in axes}
    assert kinds == {"all-reduce"} == {kind for (kind, axes) in moved(before) if "tp" in axes}
    assert moved(after)["all-reduce", "tp"] <= CHUNKS * moved(before)["all-reduce", "tp"]


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "vocab"), [(False, 4096), (True, 4096), (False, 4099)])
def test_the_compiled_step_needs_less_memory(tied, vocab):
    temp = []
    for chunks in (1, 8):
        work = workload("llama-tiny").with_(batch_size=64, vocab=vocab, tie_head=tied, loss_chunks=chunks)
        step, state, batch = workload_step(work)
        analysis = jax.jit(step, donate_argnums=0).lower(state, batch).compile().memory_analysis()
        assert analysis is not None
        temp.append(analysis.temp_size_in_bytes)
    logits = 64 * 32 * vocab * 4
    assert temp[0] > logits and temp[0] - temp[1] > 0.5 * logits


def test_the_estimated_peak_falls():
    """Llama 3 8B's widths: the peak falls by at least half of the logits of a device, 6.3 GB in bfloat16.

    Their gradient is written over them. With all layers, the memory of the layers would limit the fall.
    """
    peaks = []
    for chunks in (1, 8):
        work = workload("llama3-8b").with_(batch_size=48, context=8192, layers=2, loss_chunks=chunks)
        step, state, batch = workload_step(work)
        plan = autoshard.plan(step, state, batch, target="v6e:4x4", plan="fsdp:16", donate_argnums=0)
        peaks.append(plan.estimate.peak_memory_bytes)
    assert peaks[0] - peaks[1] > 0.5 * 3 * 8192 * 128_256 * 2


@pytest.mark.slow
def test_the_estimated_peak_of_capped_logits_falls():
    """Gemma 4 31B's widths with two layers: the logits of a device are 8.6 GB in float32."""
    peaks = []
    for chunks in (1, 8):
        whole = workload("gemma4-31b")
        work = whole.with_(batch_size=16, context=8192, kinds=whole.config.kinds[:2], loss_chunks=chunks)
        step, state, batch = workload_step(work)
        plan = autoshard.plan(step, state, batch, target="v6e:4x4", plan="fsdp:16", donate_argnums=0)
        peaks.append(plan.estimate.peak_memory_bytes)
    assert peaks[0] - peaks[1] > 0.5 * 8192 * 262_144 * 4
