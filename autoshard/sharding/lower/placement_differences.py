"""Where the placements of arrays differ from the plan, path by path, for error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding

from autoshard import _compat
from autoshard.sharding.machines.device_mesh import mesh_sizes
from autoshard.sharding.program.path_patterns import first_few


def placement_differences(paths: Sequence[str], leaves: Sequence[Any], planned: Sequence[NamedSharding]) -> str:
    """The first few differences; empty if there are none.

    Args:
        paths: the path of each leaf.
        leaves: arrays, or shapes with shardings. Arrays that are not committed to a device are never misplaced, because
            `jax.jit` moves them.
        planned: the planned sharding of each leaf.
    """
    return first_few(
        [
            f"'{path}' is {_place_text(leaf.sharding)}, planned {_place_text(wanted)}"
            for path, leaf, wanted in zip(paths, leaves, planned, strict=True)
            if _is_misplaced(leaf, wanted)
        ],
        "; ",
    )


def _is_misplaced(leaf: Any, planned: NamedSharding) -> bool:
    if _compat.is_tracer(leaf) or getattr(leaf, "sharding", None) is None or not getattr(leaf, "committed", True):
        return False
    if not leaf.sharding.is_equivalent_to(planned, leaf.ndim):
        return True
    return isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh != planned.mesh


def _place_text(sharding: Any) -> str:
    memory = f" in {_compat.HOST_KIND} memory" if sharding.memory_kind == _compat.HOST_KIND else ""
    if not isinstance(sharding, NamedSharding):
        devices = sorted(map(str, sharding.device_set))
        return f"on {devices[0] if len(devices) == 1 else f'{len(devices)} devices'}{memory}"
    kinds = {kind for kind in sharding.mesh.axis_types if kind is not AxisType.Auto}
    types = f" of {' and '.join(sorted(kind.name for kind in kinds))} axes" if kinds else ""
    return f"{sharding.spec} on mesh {mesh_sizes(sharding.mesh)}{types}{memory}"
