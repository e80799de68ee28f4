"""Attention's forward pass and its gradients as two functions, for programs that are differentiated already.

The result and the log-sum-exp of each row are all that the gradients need besides the operands and the cotangent.
Shapes are those of `blockwise_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autoshard.kernels.blockwise_attention import Pairs, Softmax
from autoshard.kernels.cudnn_attention import cudnn_attention, cudnn_backward, cudnn_forward
from autoshard.kernels.kernel_choice import KERNELS, refusals
from autoshard.kernels.splash_attention import splash_attention, splash_backward, splash_forward

Kernel = Literal["splash", "cudnn", "blockwise"]


def kernel_of(platform: str) -> Kernel:
    """Return the kernel of a platform (`planned_platform`). Platforms without one compute block by block."""
    return KERNELS.get(platform, "blockwise")


def kernel_refusals(kernel: Kernel, softmax: Softmax, q: Any, k: Any, v: Any) -> list[str]:
    """Return why a kernel cannot run a call; empty if it can. The operands need only shapes and dtypes."""
    if kernel == "blockwise":
        return []
    dtype = _common_dtype(q, k, v)
    q, k, v = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (q, k, v))
    return refusals(kernel, q, k, v, softmax, Pairs(), None)


def forward_pass(
    kernel: Kernel, softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the log-sum-exp of each row, `[batch, kv_heads, group, queries]`."""
    q, k, v = _common(q, k, v)
    if kernel == "splash":
        return splash_forward(softmax, q, k, v)
    if kernel == "cudnn":
        return cudnn_forward(softmax, q, k, v)
    return splash_forward(softmax, q, k, v, plain=True)


def gradients_pass(
    kernel: Kernel, softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of `q`, `k` and `v`."""
    q, k, v = _common(q, k, v)
    out, d_out = out.astype(q.dtype), d_out.astype(q.dtype)
    if kernel == "splash":
        return splash_backward(softmax, q, k, v, out, log_sum, d_out)
    if kernel == "cudnn":
        return cudnn_backward(softmax, q, k, v, out, log_sum, d_out)
    return splash_backward(softmax, q, k, v, out, log_sum, d_out, plain=True)


def differentiable_pass(kernel: Kernel, softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return attention's result, for programs that are differentiated later."""
    q, k, v = _common(q, k, v)
    if kernel == "splash":
        return splash_attention(softmax, q, k, v)
    if kernel == "cudnn":
        return cudnn_attention(softmax, q, k, v)
    return splash_attention(softmax, q, k, v, plain=True)


def _common_dtype(*arrays: Any) -> Any:
    return jnp.result_type(*(x.dtype for x in arrays))


def _common(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Return operands in one dtype: a program may have some of them in float32."""
    dtype = _common_dtype(*arrays)
    return [x.astype(dtype) for x in arrays]
