"""The platform that a program is traced for: that of the machine it is planned for, else the default backend.

A kernel is chosen when the program is traced, before it is lowered. The platform is a part of JAX's cache keys, so a
function that was traced for one platform is traced again for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
from jax.sharding import AxisType

from autoshard._shown import shown


@shown
class Planned(NamedTuple):
    """What a program is traced for.

    Attributes:
        platform: the JAX platform.
        vector_memory_bytes: the vector memory of a TPU's core; 0 if it is unknown.
        compute_capability: NVIDIA's version of a GPU's architecture, such as 9.0; 0 if it is unknown.
    """

    platform: str
    vector_memory_bytes: int = 0
    compute_capability: float = 0.0


_PLATFORM = jax.make_user_context(None)


def planned_platform() -> str:
    """Return `tpu`, `cuda`, `rocm` or `cpu`: the platform that the program is traced for.

    >>> with planned_for("tpu"):
    ...     planned_platform()
    'tpu'
    """
    planned: Planned | None = _PLATFORM.value
    platform = planned.platform if planned else jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def planned_vector_memory() -> int:
    """Return the bytes of vector memory of a core of the TPU that the program is planned for; 0 if it is unknown."""
    planned: Planned | None = _PLATFORM.value
    return planned.vector_memory_bytes if planned else 0


def planned_compute_capability() -> float:
    """Return the compute capability of the GPU that the program is traced for; 0 if it is unknown.

    >>> with planned_for(Planned("cuda", compute_capability=9.0)):
    ...     planned_compute_capability()
    9.0
    """
    planned: Planned | None = _PLATFORM.value
    if planned:
        return planned.compute_capability
    return float(getattr(jax.devices()[0], "compute_capability", 0.0)) if planned_platform() == "cuda" else 0.0


def runs_per_shard() -> bool:
    """Return whether a kernel that is traced here runs on the shards of one device, as it must.

    That holds in planned programs, under `shard_map`, and on one device. Elsewhere XLA would have to partition the
    kernel, which it cannot.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
    return _PLATFORM.value is not None or manual or jax.device_count() == 1


@contextmanager
def planned_for(machine: Planned | str | None) -> Iterator[None]:
    """Trace for a machine, or a platform, inside this context; None is the default backend's platform."""
    with _PLATFORM(Planned(machine) if isinstance(machine, str) else machine):
        yield
