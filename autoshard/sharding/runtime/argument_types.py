"""The properties of a single argument, an array or a number, that a plan depends on."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard import _compat


def type_of(x: Any) -> tuple[Any, Any, bool, bool]:
    """Return shape, dtype, weak type and host memory of an argument: what a plan depends on.

    Raises:
        TypeError: it is neither an array nor a number.
    """
    if isinstance(x, type):
        raise TypeError(f"{x} is a class")
    if not hasattr(x, "dtype"):  # a Python number
        return (), jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)), True, False
    if getattr(x.dtype, "kind", "") in tuple("OSU"):
        raise TypeError(f"JAX does not support {x.dtype}")
    dtype = x.dtype if _compat.is_extended(x.dtype) else jax.dtypes.canonicalize_dtype(x.dtype)
    return x.shape, dtype, bool(getattr(x, "weak_type", False)), _compat.is_on_host(x)


def is_placed(x: Any) -> bool:
    """Return whether the caller has placed an array on several devices."""
    return isinstance(x.sharding, NamedSharding) and x.sharding.mesh.size > 1 and getattr(x, "committed", True)
