"""Types of arrays: dtypes, weak types, and the mesh axes over which a value varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import config, core, dtypes
from jax._src.array import ArrayImpl

# JAX 0.10 ends the process if a program on several devices gets an array that was donated; 0.12 raises an error.
CRASHES_ON_DONATED = jax.__version_info__ < (0, 12)


def is_extended(dtype: Any) -> bool:
    """Returns whether a dtype is one of JAX's extended dtypes, such as a typed random key."""
    return not isinstance(dtype, np.dtype) and dtypes.issubdtype(dtype, dtypes.extended)


def is_array_type(aval: Any) -> bool:
    """Returns whether an abstract value is an array, not a reference to a mutable one, a token or the like."""
    return isinstance(aval, core.ShapedArray)


def element_shape(dtype: Any) -> tuple[int, ...]:
    """Returns the shape of the plain array that represents one element of an extended dtype."""
    return core.physical_element_aval(dtype).shape


def is_floating(dtype: Any) -> bool:
    """Returns whether a dtype is a floating-point type."""
    return dtypes.issubdtype(dtype, jax.numpy.floating)


def has_deleted(values: Sequence[Any]) -> bool:
    """Returns whether one of these values is an array that was donated or deleted.

    It is fast, because with `CRASHES_ON_DONATED` it runs at every call.
    """
    try:
        return any(map(ArrayImpl.is_deleted, values))
    except TypeError:  # one of them is no array
        pass
    for x in values:  # the exact type, because `isinstance(x, jax.Array)` takes ten times as long
        if type(x) is ArrayImpl and x.is_deleted():
            return True
    return False


def is_tracer(value: Any) -> bool:
    """Returns whether a value is a tracer."""
    return isinstance(value, core.Tracer)


def weakly_typed(array: jax.Array) -> jax.Array:
    """Returns the array with a weak type: like a Python number, it does not promote other dtypes."""
    return lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def result_type(shape: Any, dtype: Any, operands: Any, space: Any = jax.memory.Space.Device) -> Any:
    """Returns the abstract value of an opaque operator's result.

    Under `shard_map` the result varies over every mesh axis over which an operand varies. `space` is its memory.
    """
    varying = frozenset[str]().union(*(aval.manual_axis_type.varying for aval in operands))
    mesh = next((aval.sharding.mesh for aval in operands if not aval.sharding.mesh.empty), None)
    if mesh is None:
        return core.ShapedArray(shape, dtype, memory_space=space)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    varies = core.ManualAxisType(varying=varying)
    return core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=varies, memory_space=space)


def varying_axes(value: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which a value varies under `shard_map`."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def unchecked_varying() -> Any:
    """Returns a context in which JAX does not check over which manual mesh axes results vary."""
    return config._check_vma(False)
