"""Attention's forward pass and its gradients as two functions, for programs that are differentiated already.

The result and the log-sum-exp of each row are all that the gradients need besides the operands and the cotangent.
Shapes are those of `blockwise_attention`. `segments` are those of queries `[batch, queries]` and keys `[batch, keys]`:
a query sees the keys of its own segment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.kernels.blockwise_attention import Pairs, Softmax
from autoshard.kernels.cudnn_attention import cudnn_attention, cudnn_backward, cudnn_forward
from autoshard.kernels.kernel_choice import KERNELS, refusals
from autoshard.kernels.splash_attention import splash_attention, splash_backward, splash_forward
from autoshard.kernels.unseen_rows import Unseen, gradients_of_means, with_means

Kernel = Literal["splash", "cudnn", "blockwise"]


def kernel_of(platform: str) -> Kernel:
    """Return the kernel of a platform (`planned_platform`). Platforms without one compute block by block."""
    return KERNELS.get(platform, "blockwise")


@shown
@dataclass(frozen=True)
class Passes:
    """The static part of the two functions.

    Attributes:
        kernel: the kernel.
        softmax: the static part of attention.
        unseen: how rows without a visible key are computed. Without segments, there are none.
    """

    kernel: Kernel
    softmax: Softmax
    unseen: Unseen = "none"


def kernel_refusals(kernel: Kernel, softmax: Softmax, q: Any, k: Any, v: Any, *, has_segments: bool) -> list[str]:
    """Return why a kernel cannot run a call; empty if it can. The operands need only shapes and dtypes."""
    if any(x.dtype == jnp.float64 for x in (q, k, v)):
        return ["it adds up in float32, and the operands are float64"]
    if kernel == "blockwise":
        return []
    dtype = _common_dtype(q, k, v)
    q, k, v = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (q, k, v))
    segments: list[Any] = [jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if has_segments else None for x in (q, k)]
    return refusals(kernel, q, k, v, softmax, Pairs(None, None, *segments), None)


def forward_pass(
    passes: Passes, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the log-sum-exp of each row, `[batch, kv_heads, group, queries]`."""
    q, k, v = _common(q, k, v)
    if passes.kernel == "cudnn":
        return cudnn_forward(passes.softmax, q, k, v)
    plain = passes.kernel == "blockwise"
    out, log_sum = splash_forward(passes.softmax, q, k, v, segments=_pair(segments), plain=plain)
    return out if passes.unseen == "none" else with_means(out, log_sum, v), log_sum


def gradients_pass(
    passes: Passes, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array, d_out: jax.Array,
    *segments: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of `q`, `k` and `v`."""
    q, k, v = _common(q, k, v)
    out, d_out = out.astype(q.dtype), d_out.astype(q.dtype)
    if passes.kernel == "cudnn":
        return cudnn_backward(passes.softmax, q, k, v, out, log_sum, d_out)
    plain = passes.kernel == "blockwise"
    found = splash_backward(passes.softmax, q, k, v, out, log_sum, d_out, segments=_pair(segments), plain=plain)
    if passes.unseen == "none":
        return found
    more = gradients_of_means(passes.unseen, passes.softmax.scale, q, k, v, log_sum, d_out)
    d_q, d_k, d_v = (x if y is None else (x + y).astype(x.dtype) for x, y in zip(found, more, strict=True))
    return d_q, d_k, d_v


def differentiable_pass(passes: Passes, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
    """Return attention's result, for programs that are differentiated later."""
    if segments:
        return _segmented(passes, q, k, v, segments)
    q, k, v = _common(q, k, v)
    if passes.kernel == "cudnn":
        return cudnn_attention(passes.softmax, q, k, v)
    return splash_attention(passes.softmax, q, k, v, plain=passes.kernel == "blockwise")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _segmented(passes: Passes, q, k, v, segments) -> jax.Array:
    return forward_pass(passes, q, k, v, *segments)[0]


def _segmented_forward(passes: Passes, q, k, v, segments):
    out, log_sum = forward_pass(passes, q, k, v, *segments)
    return out, (q, k, v, segments, out, log_sum)


def _segmented_backward(passes: Passes, saved, d_out):
    q, k, v, segments, out, log_sum = saved
    found = gradients_pass(passes, q, k, v, out, log_sum, d_out, *segments)
    return *(x.astype(y.dtype) for x, y in zip(found, (q, k, v), strict=True)), None


_segmented.defvjp(_segmented_forward, _segmented_backward)


def _pair(segments: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array] | None:
    return (segments[0], segments[1]) if segments else None


def _common_dtype(*arrays: Any) -> Any:
    return jnp.result_type(*(x.dtype for x in arrays))


def _common(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Return operands in one dtype: a program may have some of them in float32."""
    dtype = _common_dtype(*arrays)
    return [x.astype(dtype) for x in arrays]
