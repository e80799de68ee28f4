"""Softmax and losses. Each loss is unreduced: one value per example or token.

For logits z of V classes and the label y:

    cross_entropy = log sum_v exp(z[v]) - z[y]

Both terms are reductions over the classes. If the classes are sharded (a vocabulary-parallel head), each device
computes the maximum, the sum and the label's logit of its own shard, and three small reductions combine them. The
label's logit is selected by a comparison and a sum, so that no logits move. Losses are float32 for logits of any dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy.special import xlogy

from autoshard.spmdrules.catalogue.entry import Operator, f32


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x.astype(jnp.float32), -1)


def _picked(values: jax.Array, labels: jax.Array) -> jax.Array:
    """`values[..., labels]` by a comparison and a sum; 0 where a label is out of range."""
    classes = lax.broadcasted_iota(labels.dtype, values.shape, values.ndim - 1)
    return jnp.sum(jnp.where(classes == jnp.expand_dims(labels, -1), values, jnp.zeros_like(values)), -1)


def masked_softmax(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`softmax` over the elements of the last dimension where the boolean mask is true; 0 elsewhere."""
    return jnp.where(mask, jax.nn.softmax(x, -1, where=mask), jnp.zeros_like(x))


def softmax_with_temperature(x: jax.Array, temperature: jax.Array) -> jax.Array:
    """`softmax(x / temperature)` over the last dimension, temperature `[]`."""
    return jax.nn.softmax(x / temperature, -1)


def cross_entropy(logits: jax.Array, labels: jax.Array, *, smoothing: float = 0.0, z_loss: float = 0.0) -> jax.Array:
    """`log Z - (1 - smoothing) z[y] - smoothing mean_v(z) + z_loss log(Z)^2` with Z the sum of exponentials.

    Args:
        logits: `[..., classes]`.
        labels: integers `[...]`.
        smoothing: the fraction of the target that is spread over all classes (arXiv:1512.00567).
        z_loss: the weight of the term that keeps log Z near 0 (PaLM, arXiv:2204.02311).

    Returns:
        The loss in nats, `[...]`, float32.
    """
    z = logits.astype(jnp.float32)
    top = jnp.max(lax.stop_gradient(z), -1, keepdims=True)
    z = z - top
    shifted = jnp.log(jnp.sum(jnp.exp(z), -1))
    loss = shifted - (1.0 - smoothing) * _picked(z, labels)
    if smoothing:
        loss = loss - smoothing * jnp.mean(z, -1)
    if z_loss:
        loss = loss + z_loss * jnp.square(shifted + jnp.squeeze(top, -1))
    return loss


def cross_entropy_label_smoothing(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`cross_entropy` with a smoothing of 0.1."""
    return cross_entropy(logits, labels, smoothing=0.1)


def cross_entropy_z_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`cross_entropy` with a z-loss of PaLM's weight, 1e-4."""
    return cross_entropy(logits, labels, z_loss=1e-4)


def masked_cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `cross_entropy` weighted by a mask `[...]`; 0 if the weights sum to 0."""
    weights = mask.astype(jnp.float32)
    count = jnp.sum(weights)
    return jnp.sum(cross_entropy(logits, labels) * weights) / jnp.where(count == 0.0, 1.0, count)


def linear_cross_entropy(hidden: jax.Array, head: jax.Array, labels: jax.Array, *, chunks: int = 4) -> jax.Array:
    """`cross_entropy(hidden @ head, labels)`, computed for one chunk of the sequence at a time.

    The backward pass recomputes the logits, so that both passes hold `batch * seq / chunks * classes` of them. A chunk
    takes every `chunks`-th position, so that each device of a sharded sequence has an equal part of every chunk.

    Args:
        hidden: `[batch, seq, embed]`.
        head: `[embed, classes]`.
        labels: integers `[batch, seq]`.
        chunks: the number of chunks; divides seq.

    Returns:
        `[batch, seq]`.
    """
    batch, seq, embed = hidden.shape
    inputs = jnp.moveaxis(hidden.reshape(batch, seq // chunks, chunks, embed), 2, 0)
    targets = jnp.moveaxis(labels.reshape(batch, seq // chunks, chunks), 2, 0)

    @jax.checkpoint
    def chunk_loss(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = jnp.einsum("bse,ev->bsv", chunk[0], head, preferred_element_type=jnp.float32)
        return cross_entropy(logits, chunk[1])

    return jnp.moveaxis(lax.map(chunk_loss, (inputs, targets)), 0, 2).reshape(batch, seq)


def nll_loss(log_probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    """`-log p[y]` from log-probabilities `[..., classes]` and integer labels y `[...]`."""
    return -_picked(log_probabilities, labels)


def binary_cross_entropy(probabilities: jax.Array, targets: jax.Array) -> jax.Array:
    """`-t log p - (1 - t) log(1 - p)` of each element, with 0 log 0 = 0."""
    return -(xlogy(targets, probabilities) + xlogy(1.0 - targets, 1.0 - probabilities))


def mse_loss(x: jax.Array, target: jax.Array) -> jax.Array:
    """The mean of squared errors over the last dimension."""
    return _mean(jnp.square(x - target))


def l1_loss(x: jax.Array, target: jax.Array) -> jax.Array:
    """The mean of absolute errors over the last dimension."""
    return _mean(jnp.abs(x - target))


def smooth_l1_loss(x: jax.Array, target: jax.Array, *, beta: float = 1.0) -> jax.Array:
    """`d^2 / (2 beta)` where `|d| < beta`, else `|d| - beta / 2`, of each element: Huber's loss divided by beta."""
    return optax.losses.huber_loss(x, target, delta=beta) / beta


def quantile_loss(x: jax.Array, target: jax.Array, *, quantile: float = 0.9) -> jax.Array:
    """The pinball loss of each element: `max(q d, (q - 1) d)` with `d = target - x`."""
    error = target - x
    return jnp.maximum(quantile * error, (quantile - 1.0) * error)


def poisson_nll_loss(log_rate: jax.Array, count: jax.Array) -> jax.Array:
    """`exp(r) - k r` of each element: the Poisson negative log-likelihood without the term that is constant in r."""
    return jnp.exp(log_rate) - count * log_rate


def gaussian_nll_loss(mean: jax.Array, log_variance: jax.Array, target: jax.Array) -> jax.Array:
    """`(v + (t - m)^2 exp(-v)) / 2` of each element, where v is the logarithm of the variance."""
    return 0.5 * (log_variance + jnp.square(target - mean) * jnp.exp(-log_variance))


def vae_kl_loss(mean: jax.Array, log_variance: jax.Array) -> jax.Array:
    """The KL divergence of a diagonal normal from the standard normal, over the last dimension (arXiv:1312.6114)."""
    return 0.5 * jnp.sum(jnp.exp(log_variance) + jnp.square(mean) - 1.0 - log_variance, -1)


def js_divergence(p: jax.Array, q: jax.Array) -> jax.Array:
    """The Jensen-Shannon divergence of distributions over the last dimension."""
    middle = 0.5 * (p + q)
    terms = xlogy(p, p) + xlogy(q, q) - 2.0 * xlogy(middle, middle)
    return 0.5 * jnp.sum(terms, -1)


def distillation_loss(student: jax.Array, teacher: jax.Array, *, temperature: float = 2.0) -> jax.Array:
    """`T^2 KL(softmax(teacher / T), softmax(student / T))` of logits `[..., classes]` (arXiv:1503.02531)."""
    target = jax.nn.log_softmax(lax.stop_gradient(teacher) / temperature, -1)
    prediction = jax.nn.log_softmax(student / temperature, -1)
    return temperature**2 * jnp.sum(jnp.exp(target) * (target - prediction), -1)


def cosine_embedding_loss(x: jax.Array, y: jax.Array, sign: jax.Array, *, margin: float = 0.2) -> jax.Array:
    """`1 - cos(x, y)` where the sign `[...]` is positive, `max(0, cos(x, y) - margin)` elsewhere."""
    cosine = optax.losses.cosine_similarity(x, y, epsilon=1e-8)
    return jnp.where(sign > 0, 1.0 - cosine, jnp.maximum(cosine - margin, 0.0))


def margin_ranking_loss(x: jax.Array, y: jax.Array, sign: jax.Array, *, margin: float = 0.1) -> jax.Array:
    """`max(0, margin - sign (x - y))` of each element. x should exceed y if the sign is 1, y should exceed x if -1."""
    return jnp.maximum(margin - sign * (x - y), 0.0)


def clip_loss(images: jax.Array, texts: jax.Array, log_scale: jax.Array) -> jax.Array:
    """The symmetric contrastive loss of each image-text pair against the rest of the batch (CLIP, arXiv:2103.00020).

    Args:
        images: `[batch, embed]`.
        texts: `[batch, embed]`.
        log_scale: the logarithm of the inverse temperature, `[]`.

    Returns:
        `[batch]`. The scores have the batch dimension twice: if it is sharded, one side's embeddings are gathered.
    """
    images, texts = (x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-12) for x in (images, texts))
    scores = jnp.exp(log_scale) * jnp.einsum("ie,te->it", images, texts, preferred_element_type=jnp.float32)
    labels = jnp.arange(images.shape[0], dtype=jnp.int32)
    return 0.5 * (cross_entropy(scores, labels) + cross_entropy(scores.T, labels))


def ppo_clip_loss(
    log_probability: jax.Array, old_log_probability: jax.Array, advantage: jax.Array, *, clip: float = 0.2
) -> jax.Array:
    """`-min(r A, clip(r, 1 - c, 1 + c) A)` of each action, where r is the ratio of probabilities (arXiv:1707.06347)."""
    ratio = jnp.exp(log_probability - old_log_probability)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantage)


def dpo_loss(
    chosen: jax.Array, rejected: jax.Array, reference_chosen: jax.Array, reference_rejected: jax.Array,
    *, beta: float = 0.1,
) -> jax.Array:  # fmt: skip
    """`-log sigmoid(beta (c - r - (c' - r')))` of the log-probabilities of whole responses (arXiv:2305.18290)."""
    return -jax.nn.log_sigmoid(beta * (chosen - rejected - (reference_chosen - reference_rejected)))


def triplet_loss(anchor: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
    """`max(0, |a - p| - |a - n| + 1)` with distances over the last dimension (arXiv:1503.03832)."""
    return optax.losses.triplet_margin_loss(anchor, positive, negative)


def ctc_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Connectionist temporal classification without padding. Class 0 is the blank (Graves et al. 2006).

    Args:
        logits: `[batch, time, classes]`.
        labels: integers from 1 upwards, `[batch, length]`.
    """
    paddings = [jnp.zeros(shape, logits.dtype) for shape in (logits.shape[:2], labels.shape)]
    return optax.losses.ctc_loss(logits, paddings[0], labels, paddings[1])


def _integers(top: int, *shape: int) -> np.ndarray:
    """Sample labels below `top`, unsorted."""
    return (np.arange(np.prod(shape), dtype=np.int32) * 7 % top).reshape(shape).astype(np.int32)


def _simplex(*shape: int) -> np.ndarray:
    """Sample distributions over the last dimension."""
    weights = 1.0 + _integers(11, *shape).astype(np.float32)
    return weights / weights.sum(-1, keepdims=True)


_LOGITS, _LABELS = f32(8, 12, 20), _integers(20, 8, 12)
_PAIR = (f32(8, 12), f32(8, 12))
_BITS = _integers(2, 8, 12).astype(np.float32)
_SIGNS = 2.0 * _BITS - 1.0
_MASK = _integers(3, 8, 12) > 0
_ODDS = _integers(11, 8, 12).astype(np.float32) / 16.0 + 0.125  # strictly between 0 and 1
_P, _Q = _simplex(8, 12), _simplex(8, 12)[:, ::-1].copy()
_RESPONSES = (f32(8),) * 4

OPERATORS: tuple[Operator, ...] = (
    Operator("softmax", jax.nn.softmax, (_LOGITS,)),
    Operator("log_softmax", jax.nn.log_softmax, (_LOGITS,)),
    Operator("masked_softmax", masked_softmax, (f32(8, 12), _MASK)),
    Operator("softmax_with_temperature", softmax_with_temperature, (_LOGITS, np.float32(0.7)), (0, 1)),
    Operator("cross_entropy", cross_entropy, (_LOGITS, _LABELS), note="if the classes are sharded, no logits move"),
    Operator("cross_entropy_label_smoothing", cross_entropy_label_smoothing, (_LOGITS, _LABELS)),
    Operator("cross_entropy_z_loss", cross_entropy_z_loss, (_LOGITS, _LABELS)),
    Operator("masked_cross_entropy", masked_cross_entropy, (_LOGITS, _LABELS, _MASK)),
    Operator("linear_cross_entropy", linear_cross_entropy, (f32(8, 16, 12), f32(12, 20), _integers(20, 8, 16)), (0, 1)),
    Operator("softmax_cross_entropy", optax.losses.softmax_cross_entropy, (f32(8, 12), _P), (0, 1)),
    Operator("safe_softmax_cross_entropy", optax.losses.safe_softmax_cross_entropy, (f32(8, 12), _P)),
    Operator(
        "softmax_cross_entropy_with_integer_labels", optax.losses.softmax_cross_entropy_with_integer_labels,
        (_LOGITS, _LABELS), note="Optax's version, which gathers the label's logit",
    ),
    Operator("poly_loss_cross_entropy", optax.losses.poly_loss_cross_entropy, (f32(8, 12), _P)),
    Operator("smooth_labels", lambda x: optax.losses.smooth_labels(x, 0.1), (_P,)),
    Operator("nll_loss", nll_loss, (_LOGITS, _LABELS)),
    Operator("binary_cross_entropy", binary_cross_entropy, (_ODDS, _BITS)),
    Operator("sigmoid_binary_cross_entropy", optax.losses.sigmoid_binary_cross_entropy, (f32(8, 12), _BITS)),
    Operator("sigmoid_focal_loss", lambda x, y: optax.losses.sigmoid_focal_loss(x, y, alpha=0.25), (f32(8, 12), _BITS)),
    Operator("squared_error", optax.losses.squared_error, _PAIR, (0, 1)),
    Operator("l2_loss", optax.losses.l2_loss, _PAIR, (0, 1)),
    Operator("mse_loss", mse_loss, _PAIR, (0, 1)),
    Operator("l1_loss", l1_loss, _PAIR, (0, 1)),
    Operator("smooth_l1_loss", smooth_l1_loss, _PAIR, (0, 1)),
    Operator("huber_loss", optax.losses.huber_loss, _PAIR, (0, 1)),
    Operator("log_cosh_loss", optax.losses.log_cosh, _PAIR, (0, 1)),
    Operator("quantile_loss", quantile_loss, _PAIR, (0, 1)),
    Operator("poisson_nll_loss", poisson_nll_loss, (f32(8, 12), _integers(5, 8, 12).astype(np.float32))),
    Operator("gaussian_nll_loss", gaussian_nll_loss, (*_PAIR, f32(8, 12)), (0, 1, 2)),
    Operator("vae_kl_loss", vae_kl_loss, _PAIR, (0, 1)),
    Operator("kl_divergence", optax.losses.kl_divergence, (np.log(_Q), _P), (0, 1)),
    Operator("kl_divergence_with_log_targets", optax.losses.kl_divergence_with_log_targets, _PAIR, (0, 1)),
    Operator("convex_kl_divergence", optax.losses.convex_kl_divergence, (np.log(_Q), _P), (0, 1)),
    Operator("js_divergence", js_divergence, (_P, _Q), (0, 1)),
    Operator("distillation_loss", distillation_loss, (f32(8, 12), f32(8, 12)), note="the teacher has no gradient"),
    Operator("cosine_distance", lambda x, y: optax.losses.cosine_distance(x, y, epsilon=1e-8), _PAIR, (0, 1)),
    Operator("cosine_embedding_loss", cosine_embedding_loss, (*_PAIR, _SIGNS[:, 0].copy()), (0, 1)),
    Operator("triplet_loss", triplet_loss, (f32(8, 12),) * 3, (0, 1, 2)),
    Operator("margin_ranking_loss", margin_ranking_loss, (*_PAIR, _SIGNS), (0, 1)),
    Operator("hinge_loss", optax.losses.hinge_loss, (f32(8, 12), _SIGNS)),
    Operator("perceptron_loss", optax.losses.perceptron_loss, (f32(8, 12), _SIGNS)),
    Operator("multiclass_hinge_loss", optax.losses.multiclass_hinge_loss, (_LOGITS, _LABELS)),
    Operator("multiclass_perceptron_loss", optax.losses.multiclass_perceptron_loss, (_LOGITS, _LABELS)),
    Operator("sparsemax_loss", optax.losses.sparsemax_loss, (f32(8, 12), _BITS)),
    Operator("dice_loss", optax.losses.dice_loss, (f32(8, 16, 12), _simplex(8, 16, 12))),
    Operator("ranking_softmax_loss", optax.losses.ranking_softmax_loss, (f32(8, 12), _BITS)),
    Operator("clip_loss", clip_loss, (f32(8, 12), f32(8, 12), np.float32(1.5)), (0, 1, 2)),
    Operator("ntxent_loss", optax.losses.ntxent, (f32(8, 12), np.arange(8, dtype=np.int32) // 2)),
    Operator("ppo_clip_loss", ppo_clip_loss, (*_PAIR, f32(8, 12)), (0, 2)),
    Operator("dpo_loss", dpo_loss, _RESPONSES, (0, 1)),
    Operator("ctc_loss", ctc_loss, (f32(8, 12, 20), 1 + _integers(19, 8, 4))),
)  # fmt: skip
