"""Over which mesh axes an array is replicated. Everything that counts replicas uses these functions.

A sum over all devices that hold an array counts each element once per replica. This affects digests, global norms
under `shard_map`, and gradients reduced by hand. Likewise, if every replica writes its copy, it is written repeatedly.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec


def sharded_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that shard each dimension of the spec, major to minor.

    >>> sharded_axes(PartitionSpec("data", None, ("model", "expert")))
    (('data',), (), ('model', 'expert'))
    """
    return tuple(() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec)


def replicated_axes(axes: Sequence[str], spec: PartitionSpec) -> tuple[str, ...]:
    """The axes of a mesh over which an array with this spec is the same on every device, in the mesh's order.

    Args:
        axes: names of the mesh's axes.
        spec: the array's sharding on it.

    >>> replicated_axes(("data", "model"), PartitionSpec(None, "model"))
    ('data',)
    """
    used = {name for names in sharded_axes(spec) for name in names}
    return tuple(name for name in axes if name not in used)
