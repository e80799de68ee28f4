"""What a program computes in a row without a visible key, where a kernel returns 0.

If the scores of all keys are one large negative number, their weights are equal, and the result is the mean of all
values. How the gradients follow depends on how the program hides a key:

    blocked   it replaces the score (`where`): only the values get a gradient
    passing   it adds a number to the score, which absorbs it: queries and keys get the gradient of equal weights

With C = sum_t (v_t - mean) k_t^T and D = sum_s d_out_s q_s^T over the rows without a visible key, and T keys:

    d_q_s = scale / T  d_out_s C      d_k_t = scale / T  (v_t - mean) D      d_v_t = 1 / T  sum_s d_out_s

Shapes are those of `blockwise_attention`. The work is linear in the sequence.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from autoshard.kernels.blockwise_attention import einsum
from autoshard.kernels.sequence.partial_results import UNSEEN

Unseen = Literal["none", "blocked", "passing"]
"""How a program computes rows without a visible key; `none` if there are no such rows."""


def with_means(out: jax.Array, log_sum: jax.Array, v: jax.Array) -> jax.Array:
    """Return attention's result with the mean of the values in rows without a visible key.

    Args:
        out: the kernel's result, `[batch, queries, kv_heads, group, features]`.
        log_sum: the log-sum-exp of each row, `[batch, kv_heads, group, queries]`.
        v: values, `[batch, keys, kv_heads, features]`.
    """
    mean = jnp.mean(v.astype(jnp.float32), axis=1)[:, None, :, None]
    return jnp.where(_rows(log_sum)[..., None], mean.astype(out.dtype), out)


def gradients_of_means(
    unseen: Unseen, scale: float, q: jax.Array, k: jax.Array, v: jax.Array, log_sum: jax.Array, d_out: jax.Array,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:  # fmt: skip
    """Return what rows without a visible key add to the gradients of `q`, `k` and `v`, in float32; None for nothing."""
    d_rows = jnp.where(_rows(log_sum)[..., None], d_out.astype(jnp.float32), 0.0)
    keys = k.shape[1]
    d_v = einsum("bskge->bke", d_rows)[:, None] / keys
    if unseen != "passing":
        return None, None, d_v
    around = v.astype(jnp.float32)
    around -= jnp.mean(around, axis=1, keepdims=True)
    d_q = einsum("bskge,bked->bskgd", d_rows, einsum("btke,btkd->bked", around, k)) * (scale / keys)
    d_k = einsum("btke,bked->btkd", around, einsum("bskge,bskgd->bked", d_rows, q)) * (scale / keys)
    return d_q, d_k, d_v


def _rows(log_sum: jax.Array) -> jax.Array:
    """Return which rows have no visible key, `[batch, queries, kv_heads, group]`."""
    return jnp.einsum("bkgs->bskg", log_sum) < UNSEEN / 2
