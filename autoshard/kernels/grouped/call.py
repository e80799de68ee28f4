"""Chooses the implementation of grouped products, by platform and by what the kernel supports."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.errors import AutoshardWarning
from autoshard.kernels.constants import SCOPED_VMEM_BYTES, VECTOR_MEMORY_PART
from autoshard.kernels.planned_platform import planned_platform, planned_vector_memory, runs_per_shard


@shown
@dataclass(frozen=True)
class GroupedCall:
    """The static part of a call.

    Attributes:
        kernel: `megablox` (on TPUs; plain JAX elsewhere), or `tiled`: plain JAX on all platforms.
        vector_memory_bytes: the vector memory that a kernel may use.
        transposed: whether the matrices are transposed.
        interpret: whether Pallas interprets the kernels, on any platform; for tests.
    """

    kernel: Literal["megablox", "tiled"]
    vector_memory_bytes: int = SCOPED_VMEM_BYTES
    transposed: bool = False
    interpret: bool = False


def grouped_call(dtype: jax.typing.DTypeLike) -> GroupedCall:
    """Return the implementation for rows and matrices of this dtype on the platform that the program is traced for.

    It is megablox on TPUs. If it cannot run there, a warning says why, and plain JAX runs (`tiled`), as elsewhere.
    """
    if planned_platform() != "tpu":
        return GroupedCall("tiled")
    reasons = []
    if dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(f"megablox takes rows and weights in bfloat16 or float32, not {jnp.dtype(dtype).name}")
    if not runs_per_shard():
        reasons.append("XLA does not partition it over several devices; use autoshard.auto_shard or jax.shard_map")
    if not reasons:
        return GroupedCall("megablox", max(planned_vector_memory() // VECTOR_MEMORY_PART, SCOPED_VMEM_BYTES))
    warnings.warn(
        f"grouped_matmul: the kernel 'megablox' cannot run: {'; '.join(reasons)}. The implementation in plain JAX runs "
        "instead.",
        AutoshardWarning,
        stacklevel=3,
    )
    return GroupedCall("tiled")
