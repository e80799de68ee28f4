"""cuDNN's attention kernels as JAX binds them: forward and backward pass, without a look at the attached GPU.

JAX's public function asks the attached GPU for its version of cuDNN when it is traced. Without a GPU, no program that
calls it could be planned.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernels

# From JAX 0.12 on, the kernels take a function of the scores.
_FLEX = "score_mod" in inspect.signature(kernels.dot_product_attention).parameters
_NO_SCORE_FUNCTION = {"score_mod_name": None, "score_mod_jaxpr": None} if _FLEX else {}


def _options(causal: bool, window: int | None, scale: float) -> dict[str, Any]:
    mask = kernels.MaskType.CAUSAL if causal else kernels.MaskType.NO_MASK
    return {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "mask_type": mask,
        "layout": kernels.AttentionLayout.BTNH.value, "sliding_window_length": window,
        **_NO_SCORE_FUNCTION,
    }  # fmt: skip


def forward(q: Any, k: Any, v: Any, *, causal: bool, window: int | None, scale: float) -> tuple[Any, Any]:
    """Runs the forward kernel: `q [batch, queries, heads, d]`, `k` and `v [batch, keys, kv_heads, d]`.

    Returns:
        The result, shaped like `q`, and the log-sum-exp of each row of scores `[batch, heads, queries]`.
    """
    unused = [jnp.zeros(0, q.dtype)] * 7  # bias, lengths, offsets, page tables
    options = _options(causal, window, scale)
    out, log_sum = kernels._dot_product_attention_fwd_p.bind(q, k, v, *unused, is_training=True, **options)
    return out, log_sum


def backward(
    q: Any, k: Any, v: Any, out: Any, log_sum: Any, d_out: Any, *, causal: bool, window: int | None, scale: float
) -> tuple[Any, Any, Any]:
    """Runs the backward kernel, and returns the gradients of `q`, `k` and `v`."""
    unused = [jnp.zeros(0, q.dtype)] * 7
    options = _options(causal, window, scale)
    return tuple(kernels._dot_product_attention_bwd_p.bind(q, k, v, *unused, log_sum, out, d_out, **options))
