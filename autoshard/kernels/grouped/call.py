"""Chooses the implementation of grouped products, by platform and by what the kernel supports."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from autoshard._compat.pallas_triton import triton
from autoshard._shown import shown
from autoshard.errors import AutoshardWarning
from autoshard.kernels.constants import SCOPED_VMEM_BYTES, TRITON_CAPABILITIES, VECTOR_MEMORY_PART
from autoshard.kernels.planned_platform import planned_platform, planned_vector_memory, runs_per_shard

KERNELS: Mapping[str, tuple[Literal["megablox", "triton"], tuple[jax.typing.DTypeLike, ...]]] = {
    "tpu": ("megablox", (jnp.bfloat16, jnp.float32)),
    "cuda": ("triton", (jnp.bfloat16, jnp.float16)),
}
"""A platform -> its kernel, and the dtypes of rows and weights that the kernel takes."""


@shown
@dataclass(frozen=True)
class GroupedCall:
    """The static part of a call.

    Attributes:
        kernel: `megablox` (on TPUs), `triton` (on NVIDIA GPUs), or `tiled` (plain JAX). Plain JAX also runs where the
            platform does not match the kernel.
        vector_memory_bytes: the vector memory that a kernel on a TPU may use.
        transposed: whether the matrices are transposed.
        launches: whether the host launches each kernel of the loop over tiles, as on GPUs. The cost depends on it.
        interpret: whether Pallas interprets the kernels, on any platform; for tests.
    """

    kernel: Literal["megablox", "triton", "tiled"]
    vector_memory_bytes: int = SCOPED_VMEM_BYTES
    transposed: bool = False
    launches: bool = False
    interpret: bool = False


def grouped_call(dtype: jax.typing.DTypeLike) -> GroupedCall:
    """Return the implementation for rows and matrices of this dtype on the platform that the program is traced for.

    It is megablox on TPUs, and the Triton kernels on NVIDIA GPUs. If a kernel cannot run, a warning says why, and plain
    JAX runs (`tiled`). Plain JAX also runs on other platforms, and on GPUs for dtypes that are not of 16 bits.
    """
    platform = planned_platform()
    if platform not in KERNELS or (platform == "cuda" and dtype not in KERNELS[platform][1]):
        return GroupedCall("tiled", launches=launches())
    kernel, dtypes = KERNELS[platform]
    reasons = [missing] if (missing := missing_kernel()) else []
    if dtype not in dtypes:
        reasons.append(f"megablox takes rows and weights in bfloat16 or float32, not {jnp.dtype(dtype).name}")
    if not runs_per_shard():
        reasons.append("XLA does not partition it over several devices; use autoshard.auto_shard or jax.shard_map")
    if not reasons:
        return kernel_call()
    warnings.warn(
        f"grouped_matmul: the kernel '{kernel}' cannot run: {'; '.join(reasons)}. The implementation in plain JAX runs "
        "instead.",
        AutoshardWarning,
        stacklevel=3,
    )
    return GroupedCall("tiled", launches=launches())


def kernel_call() -> GroupedCall:
    """Return the call of the kernel of the platform that the program is traced for, which must be in `KERNELS`."""
    kernel = KERNELS[planned_platform()][0]
    return GroupedCall(kernel, max(planned_vector_memory() // VECTOR_MEMORY_PART, SCOPED_VMEM_BYTES))


def missing_kernel() -> str:
    """Return why the planned platform's kernel cannot run with this JAX or on the attached GPU; empty if it can."""
    if planned_platform() != "cuda":
        return ""
    if triton is None:
        return "this version of JAX has no Triton backend of Pallas"
    attached = jax.devices()[0] if jax.default_backend() == "gpu" else None
    capability = getattr(attached, "compute_capability", TRITON_CAPABILITIES[0])
    if capability not in TRITON_CAPABILITIES:
        return f"it is for GPUs of compute capability {', '.join(TRITON_CAPABILITIES)}, not {capability}"
    return ""


def launches() -> bool:
    """Return whether the host launches each kernel of a loop on the platform that the program is traced for."""
    return planned_platform() in ("cuda", "rocm")
