"""Sizes and types of arrays."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from jax import numpy as jnp

from autoshard import _compat


def nbytes(aval: Any) -> int:
    """Bytes of an array with this shape and dtype. A typed PRNG key counts as 8 bytes, two words."""
    return math.prod(aval.shape) * itemsize(aval)


def itemsize(aval: Any) -> int:
    """Bytes of one element. A typed PRNG key counts as 8 bytes, two words."""
    return _dtype_size(aval.dtype)


@lru_cache(maxsize=1024)
def _dtype_size(dtype: Any) -> int:
    return 8 if _compat.is_extended(dtype) else jnp.dtype(dtype).itemsize


def axis_weight(aval: Any) -> int:
    """Bytes of an array in which empty dimensions count as size 1, so that an empty batch gives the same roles."""
    return math.prod([max(n, 1) for n in aval.shape]) * itemsize(aval)


def is_float(aval: Any) -> bool:
    """Whether the dtype is a floating-point type, or a complex one, whose parts are floats."""
    return _compat.is_floating(aval.dtype) or (
        not _compat.is_extended(aval.dtype) and jnp.issubdtype(aval.dtype, jnp.complexfloating)
    )


def is_integer(aval: Any) -> bool:
    """Whether the dtype is an integer type, of any width. Booleans and typed PRNG keys are none."""
    return not _compat.is_extended(aval.dtype) and jnp.issubdtype(aval.dtype, jnp.integer)
