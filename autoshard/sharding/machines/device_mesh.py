"""The devices that a plan is for: those of a given mesh, of a named target, or the attached ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autoshard import _compat
from autoshard._shown import shown
from autoshard._typed import convert, short_repr
from autoshard.errors import PlanError
from autoshard.kernels.planned_platform import Planned
from autoshard.sharding.machines.chips import CHIPS, chip_name
from autoshard.sharding.machines.constants import MOST_DEVICES, VIRTUAL_DEVICES
from autoshard.sharding.machines.option_requests import Part, under_request
from autoshard.sharding.machines.targets import Target, find_target, target_for
from autoshard.spmdrules.core.placement import Spec, from_partition_spec

MeshLike = Mesh | AbstractMesh | Mapping[str, int]
"""A mesh: of devices, an abstract one, or sizes such as `{"data": 4, "model": 2}`."""


@shown
@dataclass(frozen=True)
class Machine:
    """A target, together with the mesh that the user gives for it, if any.

    Attributes:
        target: the target.
        sizes: the given mesh, axis -> size, whose axes are never split further; None if the planner chooses the mesh.
        mesh: the given mesh of attached devices, if any.
        option_request: the requested compiler options; the target's chip has them.
    """

    target: Target
    sizes: Mapping[str, int] | None
    mesh: Mesh | None = None
    option_request: Sequence[Part] = ()


def find_machine(mesh: MeshLike | None, target: str | None, option_request: Sequence[Part] = ()) -> Machine:
    """The machine that the arguments `mesh=` and `target=` describe together, under requested compiler options.

    Raises:
        PlanError: the mesh and the target differ in their number of devices, `mesh` is not a mesh,
            or the target has no option set of a requested name.
    """
    sizes = mesh_sizes(mesh) if mesh is not None else None
    if sizes is not None and math.prod(sizes.values()) > MOST_DEVICES:
        raise PlanError(f"mesh {short_repr(sizes)} has more than {MOST_DEVICES} devices; give a smaller one")
    concrete = mesh if isinstance(mesh, Mesh) else None
    if target is not None:
        found = find_target(target)
        if sizes is not None and math.prod(sizes.values()) != found.devices:
            raise PlanError(f"mesh {dict(sizes)} has {math.prod(sizes.values())} devices, target '{target}' has "
                            f"{found.devices}; give both the same number")  # fmt: skip
        return Machine(under_request(found, option_request), sizes, concrete, option_request)
    devices = list(concrete.devices.flat) if concrete is not None else jax.devices()
    count = len(devices) if sizes is None else math.prod(sizes.values())
    found = under_request(target_for(devices, count), option_request)
    return Machine(found, sizes, concrete, option_request)


def traced_machine(mesh: MeshLike | None, target: str | None) -> Planned:
    """What kernels need to know of the machine that the arguments `mesh=` and `target=` describe."""
    if target is not None:
        chip = find_target(target).chip
        return Planned(chip.platform, chip.vector_memory_bytes, chip.compute_capability)
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
    name = chip_name(device.device_kind)
    capability = float(getattr(device, "compute_capability", 0.0))
    return Planned(device.platform, CHIPS[name].vector_memory_bytes if name else 0, capability)


def mesh_sizes(mesh: MeshLike) -> dict[str, int]:
    """The axes of a mesh in order: name -> size."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return dict(zip(map(str, mesh.axis_names), _sizes(mesh), strict=True))
    convert(mesh, Mapping[str, int], "mesh", problems := [])
    if not problems and mesh and all(mesh) and all(n > 0 for n in mesh.values()):
        return dict(mesh)
    raise PlanError(
        f"mesh is {short_repr(mesh)}; give a jax.sharding.Mesh, an AbstractMesh, or sizes such as "
        '{"data": 4, "model": 2}'
    )


def _sizes(mesh: Mesh | AbstractMesh) -> Sequence[int]:
    return mesh.devices.shape if isinstance(mesh, Mesh) else mesh.axis_sizes


def topology_order(devices: Sequence[Any]) -> list[Any]:
    """Sorts devices in row-major order of their topology: TPUs by slice and coordinates, others by process and id."""

    def sort_key(device: Any) -> tuple[Any, ...]:
        coords = getattr(device, "coords", None)
        if coords is None or device.platform != "tpu":
            return (device.process_index, device.id)
        return (getattr(device, "slice_index", None) or 0, *reversed(coords), getattr(device, "core_on_chip", 0))

    return sorted(devices, key=sort_key)


def device_mesh(sizes: Mapping[str, int], devices: Any = None, order: Sequence[int] = ()) -> Mesh:
    """Builds a mesh with Auto axes.

    Args:
        sizes: mesh axis -> size.
        devices: at least as many devices as the mesh needs. Default: the attached ones.
        order: for each position of the mesh, in row-major order, the index of its device in `topology_order`.
            Default: 0, 1, 2, ..., so that neighbours lie along the last axes.

    Raises:
        PlanError: there are too few devices, or `devices` holds anything other than JAX devices.
    """
    if isinstance(devices, Mesh):
        devices = devices.devices.flat
    have = list(jax.devices() if devices is None else devices if isinstance(devices, Iterable) else [devices])
    if not have or not all(hasattr(device, "platform") for device in have):
        raise PlanError(f"devices is {short_repr(devices)}; give some of jax.devices(), or a Mesh")
    need = math.prod(sizes.values())
    if need > len(have):
        raise PlanError(
            f"the plan's mesh {dict(sizes)} needs {need} devices, but there are {len(have)} ({have[0].platform}). Plan "
            f"for {len(have)}, or on CPU start with XLA_FLAGS={VIRTUAL_DEVICES}={need}"
        )
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    have = topology_order(have[:need])
    places = np.array([have[i] for i in order] if len(order) == need else have)
    return Mesh(places.reshape(tuple(sizes.values())), tuple(sizes), axis_types=auto)


def existing_placement(leaves: Sequence[Any]) -> tuple[Mesh | None, dict[int, Spec]]:
    """The mesh on which arrays are already placed.

    If they are placed on several meshes of the same devices, the mesh that holds the most elements is taken.

    Returns:
        The mesh, and the specs of the leaves on it by leaf index; (None, {}) if no leaf is placed.

    Raises:
        PlanError: the arrays are on different devices.
    """
    found: list[tuple[int, Mesh, Spec]] = []
    elements_on: dict[Mesh, int] = {}
    for i, leaf in enumerate(leaves):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            continue
        if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
            continue
        mesh = _compat.all_axes_auto(sharding.mesh)
        found.append((i, mesh, from_partition_spec(sharding.spec, leaf.ndim)))
        elements_on[mesh] = elements_on.get(mesh, 0) + leaf.size
    if not elements_on:
        return None, {}
    chosen = max(elements_on, key=lambda m: (m.size > 1, elements_on[m]))
    devices = set(chosen.devices.flat)
    for mesh in elements_on:
        if mesh.size > 1 and set(mesh.devices.flat) != devices:
            raise PlanError(
                f"the arguments are on meshes of different devices, {mesh_sizes(chosen)} and {mesh_sizes(mesh)}. Move "
                "them to one mesh"
            )
    # Leaves on other meshes are moved to this one.
    return chosen, {i: spec for i, mesh, spec in found if mesh == chosen}


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Builds an abstract mesh with Auto axes."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
