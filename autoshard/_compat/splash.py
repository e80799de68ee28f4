"""JAX's splash attention for TPUs: its forward and backward kernels as separate functions.

JAX offers them as one differentiable function only. An operator for each lets a plan shard and price them.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

MASKED = -0.7 * 3.4028234663852886e38
"""The score of an invisible pair in these kernels: `DEFAULT_MASK_VALUE`."""


def mask_info(tables: tuple[Any, Any] | None, positions: Any) -> Any:
    """Returns the kernels' description of a mask that is computed from positions.

    Args:
        tables: which blocks are visited, and whether a visit is active; None where every pair is visible.
        positions: the positions of the queries, or None where every pair is visible.
    """
    visits, active = tables if tables is not None else (None, None)
    return masks.MaskInfo(
        data_next=visits, mask_next=None, block_mask=active, partial_mask_blocks=None, q_sequence=positions
    )


def block_sizes(forward: tuple[int, int, int], dkv: tuple[int, int, int], dq: tuple[int, int]) -> Any:
    """Returns the kernels' block sizes.

    Args:
        forward: queries, keys, and keys computed at a time.
        dkv: the same for the kernel of the gradients of keys and values.
        dq: queries and keys of the kernel of the gradient of queries.
    """
    return kernels.BlockSizes(
        block_q=forward[0], block_kv=forward[1], block_kv_compute=forward[2],
        block_q_dkv=dkv[0], block_kv_dkv=dkv[1], block_kv_dkv_compute=dkv[2],
        block_q_dq=dq[0], block_kv_dq=dq[1],
    )  # fmt: skip


def segment_ids(queries: Any, keys: Any) -> Any:
    """Returns the segment of each query and of each key as the kernels take them."""
    return kernels.SegmentIds(q=queries, kv=keys)


def forward(
    info: Any, q: Any, k: Any, v: Any, segments: Any, sinks: Any, *,
    blocks: Any, mask_function: Any, soft_cap: float | None, interpret: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Runs the forward kernel on one sequence: `q [heads, queries, d]`, `k` and `v [kv_heads, keys, d]`.

    Returns:
        The result `[heads, queries, d]` and the log-sum-exp of each row of scores `[heads, queries]`.
    """
    out, (log_sum,) = kernels._splash_attention_forward(
        info, q, k, v, segments, sinks,
        mask_value=MASKED, is_mqa=False, block_sizes=blocks, residual_checkpoint_name=None, save_residuals=True,
        mask_function=mask_function, attn_logits_soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    return out, log_sum


def backward(
    dq_info: Any, dkv_info: Any, q: Any, k: Any, v: Any, segments: Any, out: Any, log_sum: Any, d_out: Any, *,
    blocks: Any, mask_function: Any, soft_cap: float | None, interpret: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Runs the backward kernels on one sequence, and returns the gradients of `q`, `k` and `v`."""
    gradients = kernels._splash_attention_bwd(
        False, MASKED, False, blocks, None, mask_function, soft_cap, interpret,
        (q, k, v, segments, None, out, log_sum, dq_info, dkv_info), d_out,
    )  # fmt: skip
    return gradients[3], gradients[4], gradients[5]
