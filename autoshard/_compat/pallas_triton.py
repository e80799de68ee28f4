"""The Triton backend of Pallas, for NVIDIA GPUs. JAX 0.11 deprecates it, so a later version may not have it."""

from __future__ import annotations

from typing import Any

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None
