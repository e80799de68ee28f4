"""cuDNN's attention kernels for NVIDIA GPUs, as two operators: the forward pass and the gradients.

They are sharded over the batch and the key heads. A sequence that is sharded is exchanged for heads (`ulysses`), or
gathered. On other platforms the operators compute the same values with `blockwise_attention`, so a program that was
planned for a GPU runs anywhere.

    forward   b s (h g) d, b t h d, b t h e -> b s (h g) e, b (h g) s
    backward  the same operands, results and cotangent -> b s (h g) d, b t h d, b t h e

`h` are key heads, `g` the query heads of each, `s` queries, `t` keys.

Source: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from autoshard._compat import cudnn
from autoshard.kernels.attention_cost import cudnn_efficiency
from autoshard.kernels.blockwise_attention import Pairs, Softmax, blockwise_backward, blockwise_forward
from autoshard.kernels.constants import CONTEXT, FALLBACK_BLOCK, FLOAT32, VECTOR_OPS
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.custom_ops.sequence_forms import SequenceForms, with_sequence_forms

FORWARD_PRODUCTS = 2  # scores, and the result


def cudnn_attention(softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return attention's result, `[batch, queries, kv_heads, group, head_dim]`.

    Args:
        softmax: the static part of attention, without a soft cap.
        q: queries, `[batch, queries, kv_heads, group, head_dim]`, of 16 bits.
        k: keys, `[batch, keys, kv_heads, head_dim]`.
        v: values, shaped like `k`.
    """
    return jnp.reshape(_attention(softmax, q.shape[3], _flat(q), k, v), (*q.shape[:4], v.shape[3]))


def cudnn_forward(softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return attention's result, and the log-sum-exp of each row, `[batch, kv_heads, group, queries]`.

    The arguments are those of `cudnn_attention`.
    """
    out, (*_, log_sum) = _attention_forward(softmax, q.shape[3], _flat(q), k, v)
    rows = log_sum.reshape(q.shape[0], *q.shape[2:4], q.shape[1])
    return jnp.reshape(out, (*q.shape[:4], v.shape[3])), rows


def cudnn_backward(
    softmax: Softmax, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, log_sum: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of `q`, `k` and `v` from the results of `cudnn_forward` and the cotangent of the first."""
    rows = [_flat(x.astype(q.dtype)) for x in (out, d_out)]
    log_sums = log_sum.reshape(log_sum.shape[0], -1, log_sum.shape[3])
    d_q, d_k, d_v = _attention_backward(softmax, q.shape[3], (_flat(q), k, v, rows[0], log_sums), rows[1])
    return d_q.reshape(q.shape), d_k, d_v


def _flat(x: jax.Array) -> jax.Array:
    """Reshape `[batch, queries, kv_heads, group, d]` to `[batch, queries, heads, d]`."""
    return jnp.reshape(x, (*x.shape[:2], -1, x.shape[4]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(softmax: Softmax, group: int, q, k, v) -> jax.Array:
    return _attention_forward(softmax, group, q, k, v)[0]


def _attention_forward(softmax: Softmax, group: int, q, k, v):
    out, log_sum = (checkpoint_name(x, CONTEXT) for x in _operators(group)[0](q, k, v, softmax=softmax))
    return out, (q, k, v, out, log_sum)


def _attention_backward(softmax: Softmax, group: int, saved, d_out):
    return _operators(group)[1](*saved, d_out, softmax=softmax)


_attention.defvjp(_attention_forward, _attention_backward)


def _cost(products: int, q: Any, k: Any, v: Any, softmax: Softmax, results: float) -> KernelCost:
    """Return the cost of a kernel that computes `products` products with heads for each visible pair."""
    pairs = float(softmax.visibility.pairs(q.shape[1], k.shape[1])) * q.shape[0] * q.shape[2]
    size = q.dtype.itemsize
    operands = (math.prod(q.shape) + math.prod(k.shape) + math.prod(v.shape)) * size
    rows = math.prod(q.shape[:3])
    return KernelCost(
        flops=2.0 * pairs * products * (q.shape[3] + v.shape[3]) / 2,
        itemsize=size,
        moved_bytes=operands + results * size + rows * FLOAT32,
        vector_ops=pairs * VECTOR_OPS,
        efficiency=cudnn_efficiency(softmax.visibility, q.shape[3], gradients=products > FORWARD_PRODUCTS),
    )


def _forward_cost(q: Any, k: Any, v: Any, *, softmax: Softmax) -> KernelCost:
    return _cost(FORWARD_PRODUCTS, q, k, v, softmax, math.prod(q.shape[:3]) * v.shape[3])


def _backward_cost(q: Any, k: Any, v: Any, out: Any, log_sum: Any, d_out: Any, *, softmax: Softmax) -> KernelCost:
    """Return the cost of the gradients: five products, one of which recomputes the scores."""
    results = 2 * math.prod(out.shape) + math.prod(q.shape) + math.prod(k.shape) + math.prod(v.shape)
    return _cost(5, q, k, v, softmax, results)


@functools.cache
def _operators(group: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the operators of the forward pass and of the gradients, for a number of query heads for each key head."""
    where = f"where g={group}; whole g s t d e"

    def forms(*operands: Any, softmax: Softmax) -> SequenceForms:
        return SequenceForms("s", ("h",), (1, 2), no_ring="cuDNN's kernels take whole sequences here")

    @operator(
        f"b s (h g) d, b t h d, b t h e -> b s (h g) e, b (h g) s; {where}", name="cudnn_attention", cost=_forward_cost
    )
    @with_sequence_forms(forms)
    def forward(q, k, v, *, softmax: Softmax):
        return lax.platform_dependent(q, k, v, cuda=_kernel(cudnn.forward, softmax), default=_plain_forward(softmax))

    @operator(
        f"b s (h g) d, b t h d, b t h e, b s (h g) e, b (h g) s, b s (h g) e -> b s (h g) d, b t h d, b t h e; {where}",
        name="cudnn_attention_gradient",
        cost=_backward_cost,
    )
    @with_sequence_forms(forms)
    def backward(q, k, v, out, log_sum, d_out, *, softmax: Softmax):
        kernel, plain = _kernel(cudnn.backward, softmax), _plain_backward(softmax)
        return lax.platform_dependent(q, k, v, out, log_sum, d_out, cuda=kernel, default=plain)

    return forward, backward


def _kernel(run: Callable[..., Any], softmax: Softmax) -> Callable[..., Any]:
    visibility = softmax.visibility
    return functools.partial(run, causal=visibility.causal, window=visibility.window, scale=softmax.scale)


def _plain_forward(softmax: Softmax) -> Callable[..., Any]:
    def forward(q, k, v):
        out, log_sum = blockwise_forward(softmax, min(FALLBACK_BLOCK, k.shape[1]), _grouped(q, k), k, v, Pairs(), None)
        return out.reshape(*q.shape[:3], -1), log_sum.reshape(log_sum.shape[0], -1, log_sum.shape[3])

    return forward


def _plain_backward(softmax: Softmax) -> Callable[..., Any]:
    def backward(q, k, v, out, log_sum, d_out):
        rows = [_grouped(x, k) for x in (q, out, d_out)]
        log_sums = log_sum.reshape(q.shape[0], *rows[0].shape[2:4], q.shape[1])
        block = min(FALLBACK_BLOCK, k.shape[1])
        d_q, d_k, d_v = blockwise_backward(softmax, block, rows[0], k, v, Pairs(), rows[1], log_sums, rows[2])
        return d_q.reshape(q.shape), d_k, d_v

    return backward


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """Reshape `[batch, queries, heads, d]` to `[batch, queries, kv_heads, group, d]`."""
    return jnp.reshape(x, (*x.shape[:2], k.shape[2], -1, x.shape[3]))
