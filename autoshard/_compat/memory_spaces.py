"""Memory kinds of arrays. A jaxpr knows two memory spaces, of the device and of its host (`jax.memory.Space`)."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax._src import core
from jax._src.lax import lax as lax_internal

HOST_KIND = "pinned_host"  # the memory kind of `jax.memory.Space.Host`


def is_on_host(x: Any) -> bool:
    """Returns whether an array, a `ShapeDtypeStruct` or an aval is in pinned host memory."""
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)  # that of an aval has none
    return kind == HOST_KIND if kind is not None else _space(x) is jax.memory.Space.Host


def _space(x: Any) -> Any:
    return getattr(getattr(x, "aval", x), "memory_space", None)


def memory_kind(x: Any) -> str | None:
    """Returns the memory kind of a value under trace for a `NamedSharding`; None for device memory, the default."""
    return HOST_KIND if _space(x) is jax.memory.Space.Host else None


def abstract_array(shape: Any, dtype: Any, weak_type: bool = False, on_host: bool = False) -> Any:
    """Returns an argument for `jax.make_jaxpr`: an array of this shape and dtype in device or host memory."""
    if not on_host:
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return core.ShapedArray(shape, dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)


def empty_array(shape: tuple[int, ...], dtype: Any, on_host: bool = False) -> Any:
    """Returns an array in device or host memory whose elements are not set, where the compiler can make one."""
    if not on_host:
        return lax_internal.empty(shape, dtype)
    return lax.broadcast(lax_internal.empty2(dtype, memory_space=jax.memory.Space.Host), shape)


def planned_shape(aval: Any, sharding: Any, on_mesh: bool = False) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument for `.lower` of a planned function.

    It has its sharding in host memory, and with `on_mesh`, so that its type is that of an array on the mesh.
    """
    place = sharding if on_mesh or is_on_host(aval) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=place)


def put_in_memory_of(x: Any, destination: Any) -> Any:
    """Returns `x` in the memory that a `device_put` of a program requests, without the sharding that it requests."""
    if isinstance(destination, jax.memory.Space):
        return jax.device_put(x, destination)
    kind = getattr(destination, "memory_kind", None)
    return x if kind is None else jax.device_put(x, core.mem_kind_to_space(kind))
