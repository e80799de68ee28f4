"""Scaled dot-product attention in four implementations: plain, blockwise, and two fused kernels.

For queries q, keys k, values v and a set M of visible (query, key) pairs:

    scores[i, j] = cap(scale * q[i] . k[j])           for (i, j) in M;  cap(x) = c tanh(x / c) with a soft cap c
    out[i]       = sum_j softmax_j(scores[i, :]) v[j]

The plain implementation holds the whole score matrix, `seq * seq` elements per head. The blockwise implementation scans
over blocks of keys and holds `seq * block_size` elements per head. `splash` is JAX's kernel for TPUs, `cudnn` NVIDIA's;
they hold no scores. The implementations are in `autoshard.kernels`.

With grouped queries, keys and values are not repeated: query heads are reshaped to `[kv_heads, group]` and contracted
with the `kv_heads` key and value heads. The queries' sequence can be sharded while keys and values are gathered. Scores
and softmax are float32. A row without a visible key is 0.
"""

from __future__ import annotations

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.kernels.blockwise_attention import Pairs, Softmax, blockwise_attention
from autoshard.kernels.cudnn_attention import cudnn_attention
from autoshard.kernels.kernel_choice import Impl, choose, of_platform, refusals
from autoshard.kernels.plain_attention import plain_attention
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.visibility import Visibility
from autoshard.models.remat.named_values import named


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    impl: Impl = "auto",
    block_size: int = 512,
    mask: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    dropout: float = 0.0,
) -> jax.Array:
    """Scaled dot-product attention with grouped queries.

    Args:
        q: queries, `[batch, seq, heads, head_dim]`.
        k: keys, `[batch, keys, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        v: values, shaped like `k`.
        causal: position i sees positions up to i; needs `keys == seq`.
        impl: `plain`; `blockwise`; `splash`, JAX's kernel for TPUs; `cudnn`, for 16-bit arrays on NVIDIA GPUs; or
            `auto`. On other platforms, `splash` and `cudnn` run as `blockwise`, with the same values. If the program is
            planned for another accelerator, a warning says so. `auto` is the kernel of the platform that the program is
            planned for, if it takes this call and there are at least `kernels.constants.KERNEL_KEYS` keys. If the
            kernel does not take the call, a warning says why. Otherwise `auto` is blockwise for at least
            `BLOCKWISE_KEYS` keys, else plain. Kernels run in planned programs, under `shard_map` and on one device: XLA
            does not partition them. They have no second derivative.
        block_size: number of keys in a block of the blockwise implementation; need not divide `keys`.
        mask: booleans, True where a query sees a key, `[batch, heads, seq, keys]`; each dimension may be 1.
        scale: factor of the scores; defaults to `1 / sqrt(head_dim)`.
        window: position i sees the `window` positions that end at its own and, without `causal`, also the `window`
            positions that start there; needs `keys == seq`.
        soft_cap: scores are `soft_cap * tanh(score / soft_cap)` (Gemma 2, arXiv:2408.00118).
        segment_ids: the document of each position, `[batch, seq]`: a query sees the keys of its own document. A pair of
            arrays gives the documents of queries and of keys separately.
        sinks: for each head the score of one more key that has no value, `[heads]` (gpt-oss, arXiv:2508.10925).
        dropout: rate at which attention weights would be dropped; must be 0, because no kernel supports it.

    Returns:
        `[batch, seq, heads, head_dim]` in q's dtype. A row without a visible key is 0.

    Raises:
        ValueError: if the shapes do not match, `impl` is unknown, or the kernel that `impl` names does not take this
            call; the message names each condition that failed.

    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attention(x, x, x, causal=True).shape
    (1, 4, 2, 8)
    """
    segments = _pair(segment_ids)
    _check(q, k, v, causal, impl, block_size, mask, scale, window, soft_cap, segments, sinks, dropout)
    batch, seq, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    softmax = Softmax(
        Visibility(bool(causal), window),
        1.0 / math.sqrt(head_dim) if scale is None else float(scale),
        None if soft_cap is None else float(soft_cap),
    )
    pairs = Pairs(None, None if mask is None else _group_mask(mask, kv_heads, group), *(segments or (None, None)))
    grouped = q.reshape(batch, seq, kv_heads, group, head_dim)
    grouped_sinks = None if sinks is None else sinks.reshape(kv_heads, group)
    impl = of_platform(impl)
    if impl == "auto":
        impl = choose(grouped, k, v, softmax, pairs, grouped_sinks)
    elif impl in ("splash", "cudnn") and (reasons := refusals(impl, grouped, k, v, softmax, pairs, grouped_sinks)):
        raise ValueError(f"{_shapes(q, k, v)}: impl {impl!r} cannot run: {'; '.join(reasons)}; or choose 'auto'")
    if impl == "splash":
        out = splash_attention(softmax, grouped, k, v, segments=segments, sinks=grouped_sinks)
    elif impl == "cudnn":
        out = cudnn_attention(softmax, grouped, k, v)
    elif impl == "plain":
        out = named(plain_attention(softmax, grouped, k, v, pairs, grouped_sinks), "context")
    else:
        out = blockwise_attention(softmax, min(block_size, keys), grouped, k, v, pairs, grouped_sinks)
    return jnp.reshape(out, (batch, seq, heads, head_dim))  # pyright: ignore[reportArgumentType]


def _pair(segment_ids) -> tuple[jax.Array, jax.Array] | None:
    if segment_ids is None:
        return None
    pair = tuple(segment_ids) if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if len(pair) != 2 or not all(hasattr(each, "shape") for each in pair):
        kinds = ", ".join(type(each).__name__ for each in pair)
        raise ValueError(
            f"attention: segment_ids are ({kinds}); pass one integer array, or one for queries and one for keys"
        )
    return pair


def _shapes(q, k, v) -> str:
    return f"attention(q {q.shape}, k {k.shape}, v {v.shape})"


def _check(q, k, v, causal, impl, block_size, mask, scale, window, soft_cap, segments, sinks, dropout) -> None:
    problems = []
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        problems.append(
            "q must be [batch, seq, heads, head_dim], and both k and v must be [batch, keys, kv_heads, head_dim]"
        )
    else:
        problems += _shape_problems(q, k, causal, window, mask, segments, sinks)
    if impl not in get_args(Impl):
        problems.append(f"impl is {impl!r}; choose one of {', '.join(get_args(Impl))}")
    if block_size < 1:
        problems.append(f"block_size is {block_size}; it must be at least 1")
    if _compat.is_tracer(scale):
        problems.append("scale is computed in the program; it must be a Python number. Multiply q by it instead")
    if soft_cap is not None and not 0.0 < soft_cap < float("inf"):
        problems.append(f"soft_cap is {soft_cap}; it must be a finite number above 0")
    if dropout:
        problems.append(
            f"dropout is {dropout}; no implementation drops attention weights, because the kernels keep none. Drop "
            "elements of the result instead"
        )
    if problems:
        raise ValueError(f"{_shapes(q, k, v)}: " + "; ".join(problems))


def _shape_problems(q, k, causal, window, mask, segments, sinks) -> list[str]:
    problems = []
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        problems.append("q and k must agree in batch (dim 0) and head_dim (dim 3)")
    if q.shape[2] % k.shape[2]:
        problems.append(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} kv heads (dim 2); change one of them"
        )
    for name, given in (("causal=True", causal), ("window", window is not None)):
        if given and q.shape[1] != k.shape[1]:
            problems.append(f"{name} needs as many keys as queries (dim 1); pass mask= for anything else")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1):
        problems.append(f"window is {window}; it must be a whole number, at least 1")
    if mask is not None:
        full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if mask.dtype != jnp.bool_:
            problems.append(f"mask must be boolean, True where a query sees a key, not {mask.dtype}")
        if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=False)):
            problems.append(
                f"mask {mask.shape} must be [batch, heads, seq, keys] = {full}, where each dimension may be 1"
            )
    if segments is not None:
        wanted = ((q.shape[0], q.shape[1]), (k.shape[0], k.shape[1]))
        found = tuple(tuple(s.shape) for s in segments)
        if found != wanted or not all(jnp.issubdtype(s.dtype, jnp.integer) for s in segments):
            problems.append(
                f"segment_ids must be integers of queries {wanted[0]} and keys {wanted[1]}, not "
                + " and ".join(f"{s.dtype}{list(s.shape)}" for s in segments)
            )
    if sinks is not None and sinks.shape != (q.shape[2],):
        problems.append(f"sinks {sinks.shape} must be [heads] = ({q.shape[2]},)")
    return problems


def _group_mask(mask: jax.Array, kv_heads: int, group: int) -> jax.Array:
    """Reshape `[batch, heads, seq, keys]` to `[batch, kv_heads, group, seq, keys]`; dimensions of 1 stay 1."""
    batch, heads, seq, keys = mask.shape
    split = (1, 1) if heads == 1 else (kv_heads, group)
    return mask.reshape(batch, *split, seq, keys)
