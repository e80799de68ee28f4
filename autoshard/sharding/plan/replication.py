"""Over which mesh axes an array is replicated: the one answer that everything which counts replicas takes.

A sum over the devices that hold an array's elements counts each of them once for every replica: a digest, a global norm
under `shard_map`, a gradient that is reduced by hand. What is written by all replicas is written several times.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec


def sharded_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that shard each dimension which the spec names, major to minor.

    >>> sharded_axes(PartitionSpec("data", None, ("model", "expert")))
    (('data',), (), ('model', 'expert'))
    """
    return tuple(() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec)


def replicated_axes(axes: Sequence[str], spec: PartitionSpec) -> tuple[str, ...]:
    """The axes of a mesh over which an array with this spec is the same on every device, in the mesh's order.

    Args:
        axes: names of the mesh's axes.
        spec: how the array lies on it.

    >>> replicated_axes(("data", "model"), PartitionSpec(None, "model"))
    ('data',)
    """
    used = {name for names in sharded_axes(spec) for name in names}
    return tuple(name for name in axes if name not in used)
