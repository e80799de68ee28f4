"""Compares losses with Optax and with formulas, and checks cross-entropy with sharded classes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.spmdrules.catalogue import losses as module
from autoshard.spmdrules.propagation.propagate import propagate
from tests.arrays import array
from tests.spmdrules.catalogue.compiled import compiled
from tests.spmdrules.jitted import jitted

losses = compiled(module)
pytestmark = pytest.mark.usefixtures("strict_numerics")
RNG = np.random.default_rng(0)
LOGITS = array(RNG.normal(size=(4, 8, 16)) * 3, jnp.float32)
LABELS = array(RNG.integers(0, 16, (4, 8)), jnp.int32)
X, Y = (array(RNG.normal(size=(8, 12)), jnp.float32) for _ in range(2))


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


@jitted
def optax_loss(logits, labels, smoothing=0.0):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        target = optax.losses.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
        return optax.losses.softmax_cross_entropy(logits, target)


@pytest.mark.few(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_and_its_gradient_equal_optax(smoothing):
    ours = lambda z: losses.cross_entropy(z, LABELS, smoothing=smoothing)  # noqa: E731
    assert_close(jax.jit(ours)(LOGITS), optax_loss(LOGITS, LABELS, smoothing=smoothing))
    gradients = [
        jax.jit(jax.grad(lambda z, f=f: f(z).sum()))(LOGITS)
        for f in (ours, lambda z: optax_loss(z, LABELS, smoothing=smoothing))
    ]
    assert_close(*gradients)


def test_z_loss_and_its_gradient():
    ours = lambda z: losses.cross_entropy(z, LABELS, z_loss=0.1).sum()  # noqa: E731
    formula = lambda z: (optax_loss(z, LABELS) + 0.1 * jax.nn.logsumexp(z, -1) ** 2).sum()  # noqa: E731
    (value, gradient), expected = (jax.jit(jax.value_and_grad(fn))(LOGITS) for fn in (ours, formula))
    assert_close(value, expected[0])
    assert_close(gradient, expected[1], 1e-4)


def test_large_bfloat16_logits_keep_their_precision():
    logits = (LOGITS * 1000).astype(jnp.bfloat16)
    actual = losses.cross_entropy(logits, LABELS)
    assert actual.dtype == jnp.float32
    assert_close(actual, optax_loss(logits.astype(jnp.float32), LABELS))


def test_masked_cross_entropy_counts_only_tokens_in_the_mask():
    mask = array(RNG.integers(0, 2, (4, 8)), bool)
    assert_close(losses.masked_cross_entropy(LOGITS, LABELS, mask), optax_loss(LOGITS, LABELS)[mask].mean())
    assert losses.masked_cross_entropy(LOGITS, LABELS, jnp.zeros_like(mask)) == 0


def test_a_chunked_head_equals_the_whole_head():
    hidden, head = LOGITS, array(RNG.normal(size=(16, 20)), jnp.float32)
    chunked = lambda h, w: losses.linear_cross_entropy(h, w, LABELS, chunks=4)  # noqa: E731
    whole = lambda h, w: losses.cross_entropy(jnp.einsum("bse,ev->bsv", h, w), LABELS)  # noqa: E731
    assert_close(jitted(chunked)(hidden, head), jitted(whole)(hidden, head))
    gradients = [jitted(jax.grad(lambda h, w, f=f: f(h, w).sum(), (0, 1)))(hidden, head) for f in (chunked, whole)]
    assert_close(gradients[0], gradients[1], 1e-4)


def gradient(logits, labels, weight):
    return jax.vjp(lambda z: losses.cross_entropy(z, labels), logits)[1](weight)[0]


def test_sharded_classes_move_no_logits():
    token_bytes = 2 * 3 / 4 * LABELS.size * 4  # an all-reduce of one number per token, over 4 devices
    vocab = P(None, None, "model")
    propagation = propagate(losses.cross_entropy, LOGITS, LABELS, in_specs=(vocab, P()), mesh={"model": 4})
    assert propagation.bytes_moved == 3 * token_bytes  # the maximum, the sum, the label's logit
    propagation = propagate(gradient, LOGITS, LABELS, LOGITS[..., 0], in_specs=(vocab, P(), P()), mesh={"model": 4})
    assert propagation.out_specs == vocab and propagation.bytes_moved <= 3 * token_bytes


def test_sharded_classes_give_the_same_result(mesh_of):
    expected = jax.jit(gradient)(LOGITS, LABELS, LOGITS[..., 0])
    logits = jax.device_put(LOGITS, NamedSharding(mesh_of(model=4), P(None, None, "model")))
    compiled = jax.jit(gradient).lower(logits, LABELS, LOGITS[..., 0]).compile()
    assert_close(compiled(logits, LABELS, LOGITS[..., 0]), expected)
    assert "all-gather" not in (compiled.as_text() or "")


def test_masked_softmax_of_a_fully_masked_row_is_zero():
    mask = jnp.asarray([[True, False, True], [False, False, False]])
    actual = losses.masked_softmax(jnp.asarray([[1.0, 9.0, 1.0], [1.0, 2.0, 3.0]]), mask)
    assert_close(actual, np.asarray([[0.5, 0, 0.5], [0, 0, 0]]))


def test_binary_cross_entropy_of_sigmoids_equals_optax():
    target = array(RNG.integers(0, 2, X.shape), jnp.float32)
    assert_close(
        jitted(losses.binary_cross_entropy)(jax.nn.sigmoid(X), target),
        jitted(optax.losses.sigmoid_binary_cross_entropy)(X, target),
    )
    assert_close(losses.binary_cross_entropy(target, target), jnp.zeros_like(X))


def test_divergences_agree_with_each_other():
    p, q = jax.nn.softmax(X), jax.nn.softmax(Y)
    kl = lambda a, b: jnp.sum(a * (jnp.log(a) - jnp.log(b)), -1)  # noqa: E731
    assert_close(losses.js_divergence(p, q), 0.5 * (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)))
    assert_close(losses.distillation_loss(Y, X, temperature=1.0), kl(p, q))
    assert_close(losses.vae_kl_loss(jnp.zeros_like(X), jnp.zeros_like(X)), jnp.zeros(8))


def test_vae_kl_agrees_with_sampling():
    mean, log_variance = jnp.float32(0.7), jnp.float32(-0.4)
    z = mean + jnp.exp(0.5 * log_variance) * array(RNG.normal(size=200_000), jnp.float32)
    log_ratio = -losses.gaussian_nll_loss(mean, log_variance, z) + 0.5 * jnp.square(z)
    actual = losses.vae_kl_loss(mean[None], log_variance[None])
    assert_close(actual, jnp.mean(log_ratio), 1e-2)


def test_simple_losses():
    assert_close(losses.smooth_l1_loss(X, Y, beta=0.5), optax.losses.huber_loss(X, Y, delta=0.5) / 0.5)
    assert_close(losses.quantile_loss(X, Y, quantile=0.5), 0.5 * jnp.abs(X - Y))
    assert_close(losses.nll_loss(jax.nn.log_softmax(LOGITS), LABELS), optax_loss(LOGITS, LABELS))
    assert_close(losses.dpo_loss(X, X, Y, Y), jnp.full(X.shape, jnp.log(2.0)))
    assert_close(losses.ppo_clip_loss(X, X, Y), -Y)


def test_clip_loss_is_symmetric_contrastive():
    images, texts = (np.asarray(a / jnp.linalg.norm(a, axis=-1, keepdims=True)) for a in (X, Y))
    scores = np.exp(1.5) * images @ texts.T
    log_p = [np.diag(np.log(np.exp(s) / np.exp(s).sum(-1, keepdims=True))) for s in (scores, scores.T)]
    assert_close(jitted(losses.clip_loss)(X, Y, jnp.float32(1.5)), -0.5 * (log_p[0] + log_p[1]))
