"""The cost of attention's kernels on one device: splash attention's from the blocks that it visits.

A block costs its matrix products and its vector operations, which run at the same time, and the overhead of one step of
the kernel's grid. A block that crosses the boundary of a mask costs as much as any other. If a causal sequence
is sharded, the last shard is priced: its queries see the most keys, and the other shards wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard._shown import shown
from autoshard.kernels.constants import (
    CUDNN_BACKWARD,
    CUDNN_CAUSAL_FORWARD,
    CUDNN_FORWARD,
    CUDNN_HEAD_DIM,
    CUDNN_SOFTMAX_SHARE,
    FALLBACK_BLOCK,
    FLOAT32,
    LANES,
    PLAIN_SCORE_PASSES,
    SCORES_HELD,
    STEP_OVERHEAD_US,
    SUBLANES,
    VECTOR_OPS,
    VECTOR_OPS_SOFT_CAP,
)
from autoshard.kernels.visibility import Visibility
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost


def stated(cost: KernelCost) -> tuple[float, float, float]:
    """Return what a kernel states to the compiler: FLOPs, transcendental operations, and bytes accessed."""
    return cost.flops, cost.vector_ops / VECTOR_OPS, cost.moved_bytes


def cudnn_efficiency(visibility: Visibility, head_dim: int, *, gradients: bool) -> float:
    """Return the share of the FLOP/s of large products that cuDNN's attention reaches.

    Softmax takes as long for small heads as for large ones, so small heads reach less.

    Args:
        visibility: which pairs are visible.
        head_dim: size of a head of the queries.
        gradients: whether the kernel computes the gradients.

    >>> full = Visibility(causal=False)
    >>> cudnn_efficiency(full, 64, gradients=True) < cudnn_efficiency(full, 128, gradients=True) < 1
    True
    """
    forward = CUDNN_CAUSAL_FORWARD if visibility.causal else CUDNN_FORWARD
    size = min(head_dim / CUDNN_HEAD_DIM, 1.0)
    reached = size / (CUDNN_SOFTMAX_SHARE + (1 - CUDNN_SOFTMAX_SHARE) * size)
    return (CUDNN_BACKWARD if gradients else forward) * reached


def visited_blocks(visibility: Visibility, queries: int, keys: int, block_q: int, block_k: int) -> int:
    """Return the number of blocks of pairs that a kernel visits, for the last `queries` of `keys` positions.

    >>> visited_blocks(Visibility(causal=True), 512, 512, 128, 128)
    10
    """
    first = np.arange(queries // block_q) * block_q + max(keys - queries, 0)
    low, high = visibility.keys_of(first, first + block_q - 1, keys)
    return int(np.maximum(high // block_k - low // block_k + 1, 0).sum())


def forward_cost(q: Any, k: Any, v: Any, *others: Any, call: Any) -> KernelCost:
    """Return the cost of the forward pass.

    Args:
        q: queries, `[batch, kv_heads, group, queries, d]`; anything with a shape and a dtype.
        k: keys, `[batch, kv_heads, keys, d]`.
        v: values, `[batch, kv_heads, keys, e]`.
        others: positions, segments and sinks.
        call: the `SplashCall`.
    """
    if call.blocks is None:
        return plain_cost(q, k, v, 1)
    block_q, block_k, _ = call.blocks.fit(q.shape[3], k.shape[2]).forward
    width, rows = k.shape[3] + v.shape[3], math.prod(q.shape[:4])
    log_sums = rows * LANES * FLOAT32  # one in each lane
    moved = rows * width * q.dtype.itemsize + log_sums
    return _Kernel(call, q, k, block_q, block_k).cost(width, block_k * width, moved, log_sums)


def plain_cost(q: Any, k: Any, v: Any, passes: float) -> KernelCost:
    """Return the cost of attention in plain JAX, block of keys by block of keys. It computes invisible pairs, too.

    Args:
        q: queries, as for `forward_cost`.
        k: keys.
        v: values.
        passes: matrix products, in units of those of the forward pass.
    """
    rows, keys, width = math.prod(q.shape[:4]), k.shape[2], q.shape[4] + v.shape[3]
    operands = (2 * rows + 2 * math.prod(k.shape[:3])) * width * q.dtype.itemsize
    return KernelCost(
        flops=2.0 * rows * keys * width * passes,
        itemsize=q.dtype.itemsize,
        moved_bytes=operands + passes * PLAIN_SCORE_PASSES * rows * keys * FLOAT32,
        held_bytes=float(rows * min(FALLBACK_BLOCK, keys) * FLOAT32 * SCORES_HELD),
        vector_ops=rows * keys * VECTOR_OPS * passes,
    )


def dkv_cost(q: Any, k: Any, v: Any, *others: Any, call: Any) -> KernelCost:
    """Return the cost of the kernel of the gradients of keys and values. The arguments are those of `forward_cost`."""
    block_q, block_k, _ = call.blocks.fit(q.shape[3], k.shape[2]).dkv
    width = k.shape[3] + v.shape[3]
    moved = 2 * math.prod(k.shape[:3]) * width * q.dtype.itemsize
    held = 2 * math.prod(q.shape[:4]) * SUBLANES * FLOAT32  # log-sum-exp and d_out . out, one in each sublane
    kernel = _Kernel(call, q, k, block_q, block_k)
    return kernel.cost(2 * width, block_q * width, moved + held, held)


def dq_cost(q: Any, k: Any, v: Any, *others: Any, call: Any) -> KernelCost:
    """Return the cost of the kernel of the gradient of queries. The arguments are those of `forward_cost`."""
    block_q, block_k = call.blocks.fit(q.shape[3], k.shape[2]).dq
    d, e, rows = k.shape[3], v.shape[3], math.prod(q.shape[:4])
    moved = rows * (2 * (d + e) * q.dtype.itemsize + 2 * SUBLANES * FLOAT32)
    return _Kernel(call, q, k, block_q, block_k).cost(2 * d + e, block_k * (d + e), moved, 0.0)


def backward_cost(q: Any, k: Any, v: Any, *others: Any, call: Any) -> tuple[KernelCost, ...]:
    """Return the costs of the two kernels of the backward pass. The arguments are those of `forward_cost`."""
    if call.blocks is None:
        return (plain_cost(q, k, v, 5 / 2),)
    return dkv_cost(q, k, v, call=call), dq_cost(q, k, v, call=call)


@shown
@dataclass(frozen=True)
class _Kernel:
    """One kernel of a call, with its block sizes."""

    call: Any
    q: Any
    k: Any
    block_q: int
    block_k: int

    def cost(self, products: int, loads: int, moved: float, held: float) -> KernelCost:
        """Return the cost of a kernel.

        Args:
            products: elements of the vectors that each pair multiplies.
            loads: elements that each visited block loads.
            moved: bytes that are read and written once.
            held: bytes of the kernel's own values.
        """
        visibility, itemsize = self.call.softmax.visibility, self.q.dtype.itemsize
        heads, queries, keys = math.prod(self.q.shape[:3]), self.q.shape[3], self.k.shape[2]
        blocks = heads * visited_blocks(visibility, queries, keys, self.block_q, self.block_k)
        steps = heads * (queries // self.block_q) * (keys // self.block_k) if visibility.window is None else blocks
        pairs = float(blocks) * self.block_q * self.block_k
        capped = VECTOR_OPS_SOFT_CAP if self.call.softmax.soft_cap is not None else 0
        return KernelCost(
            flops=2.0 * pairs * products,
            itemsize=itemsize,
            moved_bytes=float(blocks) * loads * itemsize + moved,
            held_bytes=held,
            vector_ops=pairs * (VECTOR_OPS + capped),
            overhead_us=steps * STEP_OVERHEAD_US,
        )
