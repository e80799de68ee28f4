"""The mesh of the current context, and the types of its axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src import mesh as mesh_lib


def all_axes_auto(mesh: Any) -> Any:
    """Returns the mesh with all axis types set to Auto."""
    return with_axis_types(mesh, (jax.sharding.AxisType.Auto,) * len(mesh.axis_names))


def with_axis_types(mesh: Any, types: tuple[jax.sharding.AxisType, ...]) -> Any:
    """Returns the mesh, abstract or with devices, with other types of its axes."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.update(axis_types=types)  # also keeps the kind of device
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def current_mesh() -> Any:
    """Returns the mesh set by `jax.set_mesh` or `with mesh`, or None."""
    concrete = mesh_lib.get_concrete_mesh()
    if concrete is not None and not concrete.empty:
        return concrete
    physical = mesh_lib.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def no_mesh() -> Any:
    """Returns a context without a mesh, in which a program may use devices outside of the current mesh."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def under_trace() -> bool:
    """Returns whether JAX is tracing (jit, grad, vmap, ...)."""
    return not core.trace_state_clean()


@contextlib.contextmanager
def auto_axes() -> Iterator[None]:
    """Sets the axis types of the current mesh to Auto, except under a trace."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.are_all_axes_auto or under_trace():
        yield
    else:
        with jax.sharding.use_abstract_mesh(all_axes_auto(mesh)):
            yield
