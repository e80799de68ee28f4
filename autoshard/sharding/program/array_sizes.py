"""Bytes and types of arrays."""

from __future__ import annotations

import math
from typing import Any

from jax import numpy as jnp

from autoshard import _compat


def nbytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype; a typed key counts its words."""
    return math.prod(aval.shape) * itemsize(aval)


def itemsize(aval: Any) -> int:
    """Bytes of an element; of a typed key, its words."""
    return 8 if _compat.is_extended(aval.dtype) else jnp.dtype(aval.dtype).itemsize


def axis_weight(aval: Any) -> int:
    """Bytes of an array, an empty dimension counted as one: roles are the same for an empty batch."""
    return math.prod(max(n, 1) for n in aval.shape) * itemsize(aval)


def is_float(aval: Any) -> bool:
    """Whether the value is of a floating type."""
    return _compat.is_floating(aval.dtype)
