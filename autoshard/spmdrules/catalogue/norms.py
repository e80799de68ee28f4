"""Normalization. Statistics are float32 for operands of any dtype. Results have the operand's dtype.

With the mean and the variance of x over some dimensions, and a scale and a bias per channel:

    y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias

The operators differ in these dimensions: all but the channels (batch norm), the channels (layer norm), the positions
of an example (instance norm), the positions and a group of channels (group norm). Channels are last. The variance is
the mean of squared deviations. A difference of means (E[x^2] - E[x]^2) would suffer from cancellation.

If the dimensions of the statistics are sharded, each device computes a partial sum, and one reduction combines these;
x does not move. So batch norm gives the same result on every mesh, which other frameworks call synchronized batch norm.
For statistics per device, write the groups of the batch explicitly (`ghost_batch_norm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32

_EPSILON = 1e-5  # PyTorch's default for batch, group, instance and layer norm
Moments = tuple[jax.Array, jax.Array]


def _moments(x: jax.Array, axes: Sequence[int]) -> Moments:
    """Mean and variance of a float32 `x` over `axes`, which are kept as dimensions of size 1."""
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


def _normalize(x: jax.Array, axes: Sequence[int], epsilon: float) -> jax.Array:
    """`x` in float32 with mean 0 and variance 1 over `axes`."""
    x = x.astype(jnp.float32)
    mean, variance = _moments(x, axes)
    return (x - mean) * lax.rsqrt(variance + epsilon)


def _aligned(parameter: jax.Array, ndim: int) -> jax.Array:
    """A parameter in float32, reshaped with leading dimensions of 1 to `ndim` dimensions."""
    return parameter.astype(jnp.float32).reshape((1,) * (ndim - parameter.ndim) + parameter.shape)


def _affine(y: jax.Array, scale: jax.Array, bias: jax.Array, dtype: Any) -> jax.Array:
    return (y * _aligned(scale, y.ndim) + _aligned(bias, y.ndim)).astype(dtype)


def _positions(x: jax.Array) -> tuple[int, ...]:
    """The dimensions between batch and channels."""
    return tuple(range(1, x.ndim - 1))


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float = _EPSILON) -> jax.Array:
    """Normalizes each position over its channels: x `[..., channels]`, the others `[channels]` (arXiv:1607.06450)."""
    return _affine(_normalize(x, (-1,), epsilon), scale, bias, x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, *, epsilon: float = _EPSILON) -> jax.Array:
    """`x / sqrt(mean(x^2) + epsilon) * scale` with the mean over channels: x `[..., channels]` (arXiv:1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + epsilon)
    return (y * _aligned(scale, x.ndim)).astype(x.dtype)


def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `rms_norm(total)` and `total = x + residual`, added in float32 and rounded once."""
    total = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    return rms_norm(total, scale), total


def add_layer_norm(x: jax.Array, residual: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `layer_norm(total)` and `total = x + residual`, added in float32 and rounded once."""
    total = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
    return layer_norm(total, scale, bias), total


def query_key_norm(q: jax.Array, k: jax.Array, q_scale: jax.Array, k_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`rms_norm` of each head of queries and keys, `[batch, seq, heads, head_dim]` (arXiv:2010.04245)."""
    return rms_norm(q, q_scale), rms_norm(k, k_scale)


def adaptive_layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """`normalized(x) * (1 + scale) + shift` with x `[batch, seq, channels]`, scale and shift `[batch, channels]`.

    Conditions a diffusion transformer (DiT, arXiv:2212.09748).
    """
    y = _normalize(x, (-1,), _EPSILON)
    by_example = [jnp.expand_dims(p.astype(jnp.float32), 1) for p in (scale, shift)]
    return (y * (1.0 + by_example[0]) + by_example[1]).astype(x.dtype)


def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, groups: int, epsilon: float = _EPSILON) -> jax.Array:
    """Normalizes each example over all positions and one group of adjacent channels at a time (arXiv:1803.08494).

    Args:
        x: `[batch, ..., channels]`.
        scale: `[channels]`.
        bias: `[channels]`.
        groups: the number of groups; divides the channels. One channel per group makes this `instance_norm`.
        epsilon: added to the variance.
    """
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    y = _normalize(grouped, (*_positions(x), grouped.ndim - 1), epsilon).reshape(x.shape)
    return _affine(y, scale, bias, x.dtype)


def instance_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float = _EPSILON) -> jax.Array:
    """Normalizes each channel of each example over its positions: x `[batch, ..., channels]` (arXiv:1607.08022)."""
    return _affine(_normalize(x, _positions(x), epsilon), scale, bias, x.dtype)


def adaptive_instance_norm(x: jax.Array, style: jax.Array, *, epsilon: float = _EPSILON) -> jax.Array:
    """Gives x the mean and standard deviation of `style` per channel, both `[batch, ..., channels]`.

    The two may differ in their number of positions (arXiv:1703.06868).
    """
    mean, variance = _moments(style.astype(jnp.float32), _positions(style))
    return (_normalize(x, _positions(x), epsilon) * jnp.sqrt(variance + epsilon) + mean).astype(x.dtype)


def _updated(running: jax.Array, batch: jax.Array, momentum: float) -> jax.Array:
    """`momentum * running + (1 - momentum) * batch`, without a gradient."""
    new = momentum * running.astype(jnp.float32) + (1.0 - momentum) * lax.stop_gradient(batch).reshape(running.shape)
    return new.astype(running.dtype)


def batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, variance: jax.Array,
    *, momentum: float = 0.9, epsilon: float = _EPSILON,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Normalizes each channel over the whole batch and all positions, as in training (arXiv:1502.03167).

    Args:
        x: `[batch, ..., channels]`.
        scale: `[channels]`.
        bias: `[channels]`.
        mean: running mean, `[channels]`.
        variance: running variance, `[channels]`.
        momentum: the fraction of the running statistics that is kept.
        epsilon: added to the variance.

    Returns:
        y, the next running mean, and the next running variance (of the biased variance, as in Flax).
    """
    y = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    batch_mean, batch_variance = _moments(y, axes)
    y = (y - batch_mean) * lax.rsqrt(batch_variance + epsilon)
    return (
        _affine(y, scale, bias, x.dtype),
        _updated(mean, batch_mean, momentum),
        _updated(variance, batch_variance, momentum),
    )


def batch_norm_inference(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, variance: jax.Array, *, epsilon: float = _EPSILON
) -> jax.Array:
    """Normalizes each channel by its running statistics: x `[batch, ..., channels]`, the others `[channels]`."""
    y = (x.astype(jnp.float32) - _aligned(mean, x.ndim)) * _aligned(lax.rsqrt(variance + epsilon), x.ndim)
    return _affine(y, scale, bias, x.dtype)


def ghost_batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, variance: jax.Array,
    *, groups: int, momentum: float = 0.9, epsilon: float = _EPSILON,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Applies batch norm to each of `groups` equal parts of the batch separately (arXiv:1705.08741).

    Groups are consecutive parts of the batch, so that the result is the same on every mesh. If each device holds whole
    groups, normalizing needs no reduction. The running statistics are updated with the mean over the groups.

    Args:
        x: `[batch, ..., channels]`; `groups` divides the batch.
        scale: `[channels]`.
        bias: `[channels]`.
        mean: running mean, `[channels]`.
        variance: running variance, `[channels]`.
        groups: the number of groups.
        momentum: the fraction of the running statistics that is kept.
        epsilon: added to the variance.
    """
    y = x.astype(jnp.float32).reshape(groups, x.shape[0] // groups, *x.shape[1:])
    batch_mean, batch_variance = _moments(y, tuple(range(1, y.ndim - 1)))
    y = ((y - batch_mean) * lax.rsqrt(batch_variance + epsilon)).reshape(x.shape)
    running = [
        _updated(old, jnp.mean(new, 0), momentum)
        for old, new in zip((mean, variance), (batch_mean, batch_variance), strict=True)
    ]
    return _affine(y, scale, bias, x.dtype), running[0], running[1]


def batch_renorm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, variance: jax.Array,
    *, max_ratio: float = 3.0, max_shift: float = 5.0, momentum: float = 0.9, epsilon: float = 1e-3,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Batch norm with a correction towards the running statistics, which have no gradient (arXiv:1702.03275).

    With the standard deviations s of the batch and s' of the running statistics:

        y = ((x - mean) / s * r + d) * scale + bias,    r = clip(s / s'),    d = clip((mean - mean') / s')

    Args:
        x: `[batch, ..., channels]`.
        scale: `[channels]`.
        bias: `[channels]`.
        mean: running mean, `[channels]`.
        variance: running variance, `[channels]`.
        max_ratio: r is clipped to between `1 / max_ratio` and `max_ratio`.
        max_shift: d is clipped to between `-max_shift` and `max_shift`.
        momentum: the fraction of the running statistics that is kept.
        epsilon: added to both variances.
    """
    y = x.astype(jnp.float32)
    batch_mean, batch_variance = _moments(y, tuple(range(x.ndim - 1)))
    deviation, running = jnp.sqrt(batch_variance + epsilon), jnp.sqrt(_aligned(variance, x.ndim) + epsilon)
    ratio = lax.stop_gradient(jnp.clip(deviation / running, 1.0 / max_ratio, max_ratio))
    shift = lax.stop_gradient(jnp.clip((batch_mean - _aligned(mean, x.ndim)) / running, -max_shift, max_shift))
    y = (y - batch_mean) / deviation * ratio + shift
    return (
        _affine(y, scale, bias, x.dtype),
        _updated(mean, batch_mean, momentum),
        _updated(variance, batch_variance, momentum),
    )


def filter_response_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, threshold: jax.Array) -> jax.Array:
    """`max(x / sqrt(mean(x^2)) * scale + bias, threshold)`, the mean over positions (arXiv:1911.09737).

    x is `[batch, ..., channels]`, the others are `[channels]`.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), _positions(x), keepdims=True) + 1e-6)
    return jnp.maximum(_affine(y, scale, bias, jnp.float32), _aligned(threshold, x.ndim)).astype(x.dtype)


def global_response_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float = 1e-6) -> jax.Array:
    """`x * n / mean_c(n) * scale + bias + x`, where n is the norm of each channel (ConvNeXt V2, arXiv:2301.00808).

    x is `[batch, ..., channels]`, scale and bias are `[channels]`.
    """
    y = x.astype(jnp.float32)
    # Without epsilon, the gradient of the square root would be infinite for a channel of zeros.
    norm = jnp.sqrt(jnp.sum(jnp.square(y), _positions(x), keepdims=True) + epsilon)
    ratio = norm / (jnp.mean(norm, -1, keepdims=True) + epsilon)
    return (_affine(y * ratio, scale, bias, jnp.float32) + y).astype(x.dtype)


def local_response_norm(
    x: jax.Array, *, size: int = 5, bias: float = 1.0, alpha: float = 1e-4, beta: float = 0.75
) -> jax.Array:
    """`x / (bias + alpha * sum(x^2))^beta`, summed over `size` adjacent channels: x `[..., channels]` (AlexNet)."""
    y = x.astype(jnp.float32)
    window = (1,) * (x.ndim - 1) + (size,)
    total = lax.reduce_window(jnp.square(y), 0.0, lax.add, window, (1,) * x.ndim, "SAME")
    return (y * (bias + alpha * total) ** -beta).astype(x.dtype)


def pixel_norm(x: jax.Array) -> jax.Array:
    """`rms_norm` without a scale: x `[..., channels]` (arXiv:1710.10196)."""
    return rms_norm(x, jnp.ones(x.shape[-1:], jnp.float32), epsilon=1e-8)


def l2_normalize(x: jax.Array, *, axis: int = -1, epsilon: float = 1e-12) -> jax.Array:
    """`x / sqrt(max(sum(x^2), epsilon))` over one dimension. A vector of zeros has a finite gradient."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(y), axis, keepdims=True), epsilon))).astype(x.dtype)


def dynamic_tanh(x: jax.Array, alpha: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """`tanh(alpha x) * scale + bias`, without statistics: x `[..., channels]`, alpha `[]` (arXiv:2503.10622)."""
    return _affine(jnp.tanh(alpha.astype(jnp.float32) * x.astype(jnp.float32)), scale, bias, x.dtype)


def weight_norm(direction: jax.Array, length: jax.Array) -> jax.Array:
    """Builds a kernel `[..., out]` from the directions and the lengths `[out]` of its columns (arXiv:1602.07868)."""
    w = direction.astype(jnp.float32)
    norm = lax.rsqrt(jnp.sum(jnp.square(w), tuple(range(w.ndim - 1)), keepdims=True))
    return (w * norm * _aligned(length, w.ndim)).astype(direction.dtype)


def weight_standardization(kernel: jax.Array, *, epsilon: float = 1e-5) -> jax.Array:
    """Scales a kernel `[..., in, out]` to mean 0 and variance 1 for each output (arXiv:1903.10520)."""
    return _normalize(kernel, tuple(range(kernel.ndim - 1)), epsilon).astype(kernel.dtype)


def spectral_norm(kernel: jax.Array, left: jax.Array, *, epsilon: float = 1e-12) -> tuple[jax.Array, jax.Array]:
    """Divides a kernel by its largest singular value, estimated by one step of power iteration (arXiv:1802.05957).

    Args:
        kernel: `[in, out]`.
        left: the previous estimate of the left singular vector, `[in]`. It has no gradient.
        epsilon: the lower bound on a squared norm before dividing by its root.

    Returns:
        The kernel divided by `left' W right'`, and the next estimate `left'`.
    """
    w = kernel.astype(jnp.float32)
    constant = lax.stop_gradient(w)
    right = l2_normalize(jnp.einsum("io,i->o", constant, left), epsilon=epsilon)
    left = l2_normalize(jnp.einsum("io,o->i", constant, right), epsilon=epsilon)
    sigma = jnp.einsum("i,io,o->", left, w, right)
    return (w / sigma).astype(kernel.dtype), left


_IMAGE, _CHANNELS = f32(8, 12, 4, 16), f32(16)
_STATE = (_CHANNELS,) * 4
_TOKENS, _EMBED = f32(8, 12, 16), f32(16)

OPERATORS: tuple[Operator, ...] = (
    Operator("standardize", jax.nn.standardize, (_TOKENS,), note="layer norm without parameters"),
    Operator("layer_norm", layer_norm, (_TOKENS, _EMBED, _EMBED), (0, 1, 2)),
    Operator("rms_norm", rms_norm, (_TOKENS, _EMBED), (0, 1)),
    Operator("add_layer_norm", add_layer_norm, (_TOKENS, _TOKENS, _EMBED, _EMBED), (0, 1, 2, 3)),
    Operator("add_rms_norm", add_rms_norm, (_TOKENS, _TOKENS, _EMBED), (0, 1, 2)),
    Operator("query_key_norm", query_key_norm, (f32(8, 12, 4, 16), f32(8, 12, 4, 16), _EMBED, _EMBED), (0, 1, 2, 3)),
    Operator("adaptive_layer_norm", adaptive_layer_norm, (_TOKENS, f32(8, 16), f32(8, 16)), (0, 1, 2)),
    Operator("group_norm", partial(group_norm, groups=4), (f32(8, 12, 20, 16), _CHANNELS, _CHANNELS), (0, 1, 2)),
    Operator("instance_norm", instance_norm, (_IMAGE, _CHANNELS, _CHANNELS), (0, 1, 2)),
    Operator("adaptive_instance_norm", adaptive_instance_norm, (_IMAGE, f32(8, 20, 24, 16)), (0, 1)),
    Operator("batch_norm", batch_norm, (_IMAGE, *_STATE), (0, 1, 2), "training; running statistics have no gradient"),
    Operator("batch_norm_inference", batch_norm_inference, (_IMAGE, *_STATE), (0, 1, 2, 3, 4)),
    Operator(
        "sync_batch_norm", batch_norm, (_IMAGE, *_STATE), (0, 1, 2),
        "the same as batch_norm: its statistics are those of the whole batch, on every mesh",
    ),
    Operator(
        "ghost_batch_norm", partial(ghost_batch_norm, groups=4), (f32(8, 12, 20, 16), *_STATE), (0, 1, 2),
        "statistics per part of the batch, by explicit groups",
    ),
    Operator("batch_renorm", batch_renorm, (_IMAGE, *_STATE), (0, 1, 2), "running statistics have no gradient"),
    Operator("filter_response_norm", filter_response_norm, (_IMAGE, *(_CHANNELS,) * 3), (0, 1, 2, 3)),
    Operator("global_response_norm", global_response_norm, (_IMAGE, _CHANNELS, _CHANNELS), (0, 1, 2)),
    Operator("local_response_norm", local_response_norm, (_IMAGE,)),
    Operator("pixel_norm", pixel_norm, (_IMAGE,)),
    Operator("l2_normalize", l2_normalize, (_TOKENS,)),
    Operator("dynamic_tanh", dynamic_tanh, (_TOKENS, f32(), _EMBED, _EMBED), (0, 1, 2, 3)),
    Operator("weight_norm", weight_norm, (f32(12, 16), _CHANNELS), (0, 1)),
    Operator("weight_standardization", weight_standardization, (f32(4, 8, 12, 16),)),
    Operator("spectral_norm", spectral_norm, (f32(12, 16), f32(12)), (0,), "the singular vectors have no gradient"),
)  # fmt: skip
