"""Which implementation of grouped products runs, by platform and by what the kernel takes."""

from __future__ import annotations

import warnings
from typing import Literal

import jax
import jax.numpy as jnp

from autoshard.errors import AutoshardWarning
from autoshard.kernels.planned_platform import planned_platform, runs_per_shard


def choose(dtype: jax.typing.DTypeLike) -> Literal["megablox", "tiled"]:
    """Return the implementation for rows and matrices of this dtype on the platform that the program is traced for.

    It is megablox on TPUs. If it cannot run there, a warning says why, and plain JAX runs (`tiled`), as elsewhere.
    """
    if planned_platform() != "tpu":
        return "tiled"
    reasons = []
    if dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(f"megablox takes rows and weights in bfloat16 or float32, not {jnp.dtype(dtype).name}")
    if not runs_per_shard():
        reasons.append("XLA does not partition it over several devices; use autoshard.auto_shard or jax.shard_map")
    if not reasons:
        return "megablox"
    warnings.warn(
        f"grouped_matmul: the kernel 'megablox' cannot run: {'; '.join(reasons)}. Plain JAX runs instead. Cast the "
        "operands, or run the program as stated.",
        AutoshardWarning,
        stacklevel=3,
    )
    return "tiled"
