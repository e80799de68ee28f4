"""The platform that a program is traced for: that of the machine it is planned for, else the default backend.

A kernel is chosen when the program is traced, before it is lowered. The platform is a part of JAX's cache keys, so a
function that was traced for one platform is traced again for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import AxisType

_PLATFORM = jax.make_user_context(None)


def planned_platform() -> str:
    """Return `tpu`, `cuda`, `rocm` or `cpu`: the platform that the program is traced for.

    >>> with planned_for("tpu"):
    ...     planned_platform()
    'tpu'
    """
    platform = _PLATFORM.value or jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def runs_per_shard() -> bool:
    """Return whether a kernel that is traced here runs on one device's shards: XLA cannot partition it.

    That holds in programs that are planned, under `shard_map`, and where there is one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
    return _PLATFORM.value is not None or manual or jax.device_count() == 1


@contextmanager
def planned_for(platform: str | None) -> Iterator[None]:
    """Trace for a platform inside this context; None is the default backend's."""
    with _PLATFORM(platform):
        yield
