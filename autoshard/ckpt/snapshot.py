"""A state at one moment, safe from what the next train step does to its buffers."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autoshard.ckpt import digest
from autoshard.ckpt.errors import CheckpointError, listing
from autoshard.ckpt.leaves import Key, LeafSpec, is_typed_key, leaf_spec, named_leaves

HOST = "host"


@dataclass(frozen=True)
class Snapshot:
    """What is written of a state.

    Attributes:
        specs: every leaf.
        arrays: the leaves that have elements, RNG keys as their bits.
        groups: names of groups of leaves that share a mesh, and the leaves of each.
        layouts: for each leaf on a mesh its `PartitionSpec`, as text.
        meshes: the sizes of the axes of those meshes.
    """

    specs: tuple[LeafSpec, ...]
    arrays: dict[Key, Any]
    groups: dict[str, list[Key]]
    layouts: dict[Key, str] = field(default_factory=dict)
    meshes: tuple[dict[str, int], ...] = ()

    @property
    def digests(self) -> dict[Key, tuple[str, int]]:
        """For each array its group and its column in `digest_rows`."""
        return {key: (group, column) for group, keys in self.groups.items() for column, key in enumerate(keys)}

    def digest_rows(self) -> dict[str, Any]:
        """Per group uint32 [devices, leaves + 1], computed where the leaves are; see `digest.digests`."""
        return {
            group: host_rows([self.arrays[key] for key in keys])
            if group == HOST
            else digest.digests([self.arrays[key] for key in keys])
            for group, keys in self.groups.items()
        }


def take_snapshot(state: Any, *, copy: bool) -> Snapshot:
    """Describes a state; with `copy` copies it, so that it may be donated at once.

    The copy is dispatched before this returns, and the runtime keeps a buffer alive for the programs that
    were given it before its donation. Nothing here waits for the devices.

    Raises:
        CheckpointError: a leaf cannot be saved, or its buffer was donated already.
    """
    named = named_leaves(state)
    specs = tuple(leaf_spec(key, leaf) for key, leaf in named)
    gone = ["/".join(key) for key, leaf in named if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if gone:
        raise CheckpointError(
            f"{len(gone)} leaves of the state were donated before the save:\n{listing(gone)}\n"
            "Save the state that the last step returned."
        )
    stored = {spec.key: _plain(leaf) for spec, (_, leaf) in zip(specs, named, strict=True) if spec.stored}
    arrays, groups = {}, {}
    for number, keys in enumerate(grouped(stored)):
        leaves = [stored[key] for key in keys]
        on_devices = isinstance(leaves[0], jax.Array)
        if copy:
            leaves = list(_copies(leaves)) if on_devices else [np.array(leaf) for leaf in leaves]
        groups[str(number) if on_devices else HOST] = keys
        arrays |= zip(keys, leaves, strict=True)
    on_mesh = {key: leaf.sharding for key, leaf in named if isinstance(getattr(leaf, "sharding", None), NamedSharding)}
    layouts = {key: str(tuple(sharding.spec)) for key, sharding in on_mesh.items()}
    meshes = {tuple(sharding.mesh.shape.items()): None for sharding in on_mesh.values()}
    return Snapshot(specs, arrays, groups, layouts, tuple(map(dict, meshes)))


def grouped(arrays: dict[Key, Any]) -> list[list[Key]]:
    """Paths of arrays that one program can digest together; those in NumPy form a group of their own."""
    groups: dict[Hashable, list[Key]] = {}
    for key, array in arrays.items():
        group = digest.digest_group(array.sharding) if isinstance(array, jax.Array) else HOST
        groups.setdefault(group, []).append(key)
    return list(groups.values())


def host_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """`digest.digests` of NumPy arrays, one row."""
    parts = np.array([digest.host_digest(array) for array in arrays], np.uint32)
    return np.append(parts, np.uint32(digest.host_digest(parts)))[None]


def _plain(leaf: Any) -> Any:
    """An array that Orbax writes: RNG keys as bits; what only this process holds, as NumPy."""
    if is_typed_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf) if jax.process_count() > 1 and leaf.is_fully_addressable else leaf
    return np.asarray(leaf)


def _copies(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    return _copy_program(tuple(array.sharding for array in arrays))(tuple(arrays))


@functools.lru_cache(maxsize=64)
def _copy_program(shardings: tuple[Any, ...]) -> Any:
    """A jitted copy that keeps every sharding."""
    # jnp.copy, and not the argument as it is: jit would hand that back without a copy.
    return jax.jit(lambda arrays: tuple(jnp.copy(array) for array in arrays), out_shardings=shardings)
