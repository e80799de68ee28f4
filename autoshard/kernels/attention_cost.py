"""The cost of splash attention on one device, from the blocks that its kernels visit.

A block costs its matrix products and its vector operations, which run at the same time, and the overhead of one step of
the kernel's grid. A block that crosses the boundary of a mask costs as much as any other. Of a shard of a causal
sequence the last one is priced: its queries see the most keys, and the other shards wait for it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autoshard.kernels.constants import (
    LANES,
    STEP_OVERHEAD_US,
    SUBLANES,
    VECTOR_OPS_BACKWARD,
    VECTOR_OPS_FORWARD,
    VECTOR_OPS_SOFT_CAP,
)
from autoshard.kernels.visibility import Visibility
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost


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
    block_q, block_k, _ = call.blocks.fit(q.shape[3], k.shape[2]).forward
    widths = k.shape[3] + v.shape[3]
    ops = VECTOR_OPS_FORWARD + _cap_ops(call)
    rows, size = math.prod(q.shape[:4]), q.dtype.itemsize
    log_sums = rows * LANES * 4  # one float32 in each lane
    moved = rows * widths * size + log_sums
    return _cost(call, q, k, block_q, block_k, products=widths, ops=ops, loads=widths, moved=moved, held=log_sums)


def backward_cost(q: Any, k: Any, v: Any, out: Any, log_sum: Any, d_out: Any, *others: Any, call: Any) -> KernelCost:
    """Return the cost of the two kernels of the backward pass. The arguments are those of `forward_cost`."""
    blocks = call.blocks.fit(q.shape[3], k.shape[2])
    d, e, size = k.shape[3], v.shape[3], q.dtype.itemsize
    ops = VECTOR_OPS_BACKWARD + 2 * _cap_ops(call)
    rows, key_rows = math.prod(q.shape[:4]), math.prod(k.shape[:3])
    statistics = 2 * rows * SUBLANES * 4  # log-sum-exp and d_out . out, one float32 in each sublane
    # Scores and the gradient of the weights are computed in both kernels.
    moved = 2 * key_rows * (d + e) * size
    dkv = _cost(
        call, q, k, *blocks.dkv[:2], products=2 * (d + e), ops=ops, loads=d + e, moved=moved, held=statistics,
        loads_queries=True,
    )  # fmt: skip
    moved = rows * (2 * d + 2 * e) * size + statistics
    dq = _cost(call, q, k, *blocks.dq, products=2 * d + e, ops=ops, loads=d + e, moved=moved, held=0.0)
    return dkv.plus(dq)


def _cap_ops(call: Any) -> int:
    return 0 if call.softmax.soft_cap is None else VECTOR_OPS_SOFT_CAP


def _cost(
    call: Any, q: Any, k: Any, block_q: int, block_k: int, *,
    products: int, ops: int, loads: int, moved: float, held: float, loads_queries: bool = False,
) -> KernelCost:  # fmt: skip
    """Return the cost of one kernel: per pair `2 * products` FLOPs and `ops` vector operations.

    Each visited block loads rows of `loads` elements: of its keys, or of its queries if `loads_queries`.
    """
    heads, queries, keys = math.prod(q.shape[:3]), q.shape[3], k.shape[2]
    blocks = heads * visited_blocks(call.softmax.visibility, queries, keys, block_q, block_k)
    pairs = float(blocks) * block_q * block_k
    loaded = float(blocks) * (block_q if loads_queries else block_k) * loads * q.dtype.itemsize
    steps = heads * (queries // block_q) * (keys // block_k) if call.softmax.visibility.window is None else blocks
    return KernelCost(
        flops=2.0 * pairs * products,
        itemsize=q.dtype.itemsize,
        moved_bytes=loaded + moved,
        held_bytes=held,
        vector_ops=pairs * ops,
        overhead_us=steps * STEP_OVERHEAD_US,
    )
