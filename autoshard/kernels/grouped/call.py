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

TAKEN = {"tpu": (jnp.bfloat16, jnp.float32), "cuda": (jnp.bfloat16, jnp.float16)}
"""A platform with a kernel -> the dtypes that the kernel takes."""


@shown
@dataclass(frozen=True)
class GroupedCall:
    """The static part of a call.

    Attributes:
        kernel: `megablox` (on TPUs), `triton` (on NVIDIA GPUs), or `tiled`: plain JAX. Plain JAX also runs on platforms
            that the kernel is not for.
        vector_memory_bytes: the vector memory that a kernel on a TPU may use.
        transposed: whether the matrices are transposed.
        interpret: whether Pallas interprets the kernels, on any platform; for tests.
    """

    kernel: Literal["megablox", "triton", "tiled"]
    vector_memory_bytes: int = SCOPED_VMEM_BYTES
    transposed: bool = False
    interpret: bool = False


def grouped_call(dtype: jax.typing.DTypeLike) -> GroupedCall:
    """Return the implementation for rows and matrices of this dtype on the platform that the program is traced for.

    It is megablox on TPUs, and the Triton kernels on NVIDIA GPUs. If a kernel cannot run, a warning says why, and plain
    JAX runs (`tiled`). Plain JAX also runs on other platforms, and on GPUs for dtypes that are not of 16 bits.
    """
    platform = planned_platform()
    if platform not in TAKEN or (platform == "cuda" and dtype not in TAKEN[platform]):
        return GroupedCall("tiled")
    kernel, reasons = "megablox" if platform == "tpu" else "triton", []
    if dtype not in TAKEN[platform]:
        reasons.append(f"megablox takes rows and weights in bfloat16 or float32, not {jnp.dtype(dtype).name}")
    if not runs_per_shard():
        reasons.append("XLA does not partition it over several devices; use autoshard.auto_shard or jax.shard_map")
    if not reasons:
        return GroupedCall(kernel, max(planned_vector_memory() // VECTOR_MEMORY_PART, SCOPED_VMEM_BYTES))
    warnings.warn(
        f"grouped_matmul: the kernel '{kernel}' cannot run: {'; '.join(reasons)}. The implementation in plain JAX runs "
        "instead.",
        AutoshardWarning,
        stacklevel=3,
    )
    return GroupedCall("tiled")
