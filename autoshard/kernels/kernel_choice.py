"""Chooses the implementation of attention, by platform and by what each kernel supports."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import jax.numpy as jnp

from autoshard.errors import AutoshardWarning
from autoshard.kernels.blockwise_attention import Pairs, Softmax
from autoshard.kernels.constants import (
    BLOCKWISE_KEYS,
    HOPPER,
    HOPPER_HEAD_DIM,
    KERNEL_KEYS,
    LANES,
    OLDER_HEAD_DIM,
)
from autoshard.kernels.planned_platform import planned_compute_capability, planned_platform, runs_per_shard

Impl = Literal["auto", "plain", "blockwise", "splash", "cudnn"]

KERNELS: dict[str, Literal["splash", "cudnn"]] = {"tpu": "splash", "cuda": "cudnn"}
"""Platform -> its attention kernel."""


def choose(q: Any, k: Any, v: Any, softmax: Softmax, pairs: Pairs, sinks: Any) -> Impl:
    """Return the implementation that `auto` stands for.

    It is the kernel of the platform that the program is traced for, for at least `KERNEL_KEYS` keys. If the kernel
    cannot run, a warning says why. Otherwise it is the blockwise implementation for at least `BLOCKWISE_KEYS` keys, and
    the plain one for fewer.

    Args:
        q: queries, `[batch, queries, kv_heads, group, head_dim]`; anything with a shape and a dtype.
        k: keys, `[batch, keys, kv_heads, head_dim]`.
        v: values.
        softmax: the static part of the call.
        pairs: which pairs are visible.
        sinks: the sinks, or None.
    """
    keys = k.shape[1]
    otherwise: Impl = "blockwise" if keys >= BLOCKWISE_KEYS else "plain"
    kernel = KERNELS.get(planned_platform())
    if kernel is None or keys < KERNEL_KEYS:
        return otherwise
    reasons = refusals(kernel, q, k, v, softmax, pairs, sinks)
    if not runs_per_shard():
        reasons.append("XLA does not partition it over several devices; use autoshard.auto_shard or jax.shard_map")
    if not reasons:
        return kernel
    warnings.warn(
        f"attention: the kernel {kernel!r} cannot run: {'; '.join(reasons)}. The {otherwise} implementation runs "
        "instead. Change the call, or choose that implementation with impl= to silence this warning.",
        AutoshardWarning,
        stacklevel=4,
    )
    return otherwise


def of_platform(impl: Impl) -> Impl:
    """Return the implementation that a named one runs as on the platform that the program is traced for.

    The kernel of another accelerator runs as the blockwise implementation. A warning says so, because that is slower.
    """
    platform = planned_platform()
    kernel = KERNELS.get(platform)
    if kernel is None or impl in (kernel, "auto", "plain", "blockwise"):
        return impl
    warnings.warn(
        f"attention: the kernel {impl!r} does not run on {platform!r}, whose kernel is {kernel!r}. The blockwise "
        f"implementation runs instead. Choose 'auto' or {kernel!r}.",
        AutoshardWarning,
        stacklevel=4,
    )
    return "blockwise"


def refusals(kernel: str, q: Any, k: Any, v: Any, softmax: Softmax, pairs: Pairs, sinks: Any) -> list[str]:
    """Return why a kernel cannot run a call; empty if it can. The arguments are those of `choose`."""
    return _splash(q, k, v, pairs) if kernel == "splash" else _cudnn(q, k, v, softmax, pairs, sinks)


def _splash(q: Any, k: Any, v: Any, pairs: Pairs) -> list[str]:
    reasons = []
    if pairs.mask is not None:
        reasons.append("splash takes no mask array; use causal=, window= or segment_ids=")
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        reasons.append(f"splash takes q, k and v in bfloat16 or float32, not {q.dtype}, {k.dtype} and {v.dtype}")
    for name, size in (("queries (dim 1 of q)", q.shape[1]), ("keys (dim 1 of k)", k.shape[1])):
        if size % LANES:
            reasons.append(f"splash takes a multiple of {LANES} {name}, not {size}")
    return reasons


def _cudnn(q: Any, k: Any, v: Any, softmax: Softmax, pairs: Pairs, sinks: Any) -> list[str]:
    reasons = []
    if pairs.mask is not None:
        reasons.append("cudnn takes no mask array here; use causal= and window=")
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        reasons.append(f"cudnn takes q, k and v in bfloat16 or float16, not {q.dtype}, {k.dtype} and {v.dtype}")
    capability = planned_compute_capability()
    most = HOPPER_HEAD_DIM if capability >= HOPPER else OLDER_HEAD_DIM
    if q.shape[-1] % 8 or q.shape[-1] > most:
        on = f" on a GPU of compute capability {capability}" if capability else ""
        reasons.append(f"cudnn takes a head_dim that is a multiple of 8 and at most {most}{on}, not {q.shape[-1]}")
    if q.shape[1] % 2 or k.shape[1] % 2:
        reasons.append(f"cudnn takes an even number of queries and keys, not {q.shape[1]} and {k.shape[1]}")
    if softmax.soft_cap is not None:
        reasons.append("cudnn has no soft_cap")
    if softmax.visibility.window is not None and not softmax.visibility.causal:
        reasons.append("cudnn takes a window with causal=True only")
    if pairs.query_segments is not None:
        reasons.append("cudnn takes no segment_ids")
    if sinks is not None:
        reasons.append("cudnn has no sinks")
    return reasons
