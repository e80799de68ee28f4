"""The cost of calls of cuDNN's attention kernels in a compiled program. Such calls state none."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from autoshard.kernels.attention_cost import cudnn_efficiency
from autoshard.kernels.constants import VECTOR_OPS
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.hlo.parser import Array, Computation, Instruction, bits
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

TARGET = "__cudnn$fmha"
_CONFIG = re.compile(r'"(mask_type|sliding_window_length)":\s*"?(\w+)')
# Products of the forward pass: scores, result. Of the backward pass: the same scores again, and the gradients of
# values, scores, queries and keys.
_PRODUCTS, _PRODUCTS_BACKWARD = 2, 5
_SCRATCH = "u8"


def attention_cost(computation: Computation, i: Instruction) -> KernelCost | None:
    """The cost of a call of cuDNN's attention; None for other instructions.

    The first three operands are queries `[batch, queries, heads, d]`, keys `[batch, keys, kv_heads, d]` and values.
    """
    if i.opcode != "custom-call" or not i.target.startswith(TARGET):
        return None
    operands = [a for v in computation.operands_of(i) for a in v.arrays[:1]]
    q, k, v = operands[:3]
    (batch, queries, heads, d), keys, e = q.dims, k.dims[1], v.dims[3]
    config = dict(_CONFIG.findall(i.attributes))
    window = int(config.get("sliding_window_length", 0)) or None
    visibility = Visibility("CAUSAL" in config.get("mask_type", ""), window)
    pairs = float(batch * heads * visibility.pairs(queries, keys))
    gradients = "Backward" in i.target
    return KernelCost(
        flops=pairs * (_PRODUCTS_BACKWARD if gradients else _PRODUCTS) * (d + e),
        itemsize=max(bits(q.dtype) // 8, 1),
        moved_bytes=_bytes_of(operands) + _bytes_of(a for a in i.arrays if a.dtype != _SCRATCH),
        vector_ops=pairs * VECTOR_OPS,
        efficiency=cudnn_efficiency(visibility, d, gradients=gradients),
    )


def _bytes_of(arrays: Iterable[Array]) -> float:
    return math.fsum(a.nbytes for a in arrays)
