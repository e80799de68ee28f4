"""Many small leaves as few arrays.

Orbax takes some milliseconds for each array, whatever its size. So if a state has many small leaves, leaves of one kind
(shape, dtype and sharding) are stacked into packs: arrays `[leaves, *shape]` with the sharding of the leaves. Each
element stays on its device, and each process writes its own shards. Programs take a bounded number of leaves of one
kind, so the number of compiled programs does not grow with the number of leaves. Programs bitcast floats to unsigned
integers, because XLA may change the bits of NaNs when it concatenates or slices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from autoshard.ckpt.state.array_digest import on_device
from autoshard.ckpt.state.constants import (
    LEAVES_PER_SPLIT,
    MAX_DIMS,
    MAX_PACK_BYTES,
    MAX_PACK_LEAVES,
    MAX_UNPACKED_LEAVES,
    MIN_PACK_LEAVES,
    PACKABLE_BYTES,
)
from autoshard.ckpt.state.named_leaves import PACKS, Key, bits_of

Place = tuple[str, int]  # the name of a pack, and the index of a leaf in it


def assign_packs(arrays: Mapping[Key, Any]) -> dict[str, list[Key]]:
    """Return the leaves of each pack, by the name of the pack. Other leaves are not packed.

    Args:
        arrays: all leaves with elements, the same in every process.
    """
    if any(key[:1] == (PACKS,) for key in arrays):  # a pack would have the path of that leaf
        return {}
    kinds: dict[Hashable, list[Key]] = {}
    for key, array in arrays.items():
        kinds.setdefault((array.shape, array.dtype, getattr(array, "sharding", None)), []).append(key)
    small = [keys for keys in kinds.values() if _is_packable(arrays[keys[0]])]
    if sum(map(len, small)) <= MAX_UNPACKED_LEAVES:
        return {}
    packs = []
    for keys in small:
        if len(keys) >= MIN_PACK_LEAVES:
            max_size = max(min(MAX_PACK_LEAVES, MAX_PACK_BYTES // _nbytes(arrays[keys[0]])), 1)
            count = math.ceil(len(keys) / max_size)
            size = math.ceil(len(keys) / count)  # equal sizes where possible: each size compiles another program
            packs += [keys[start : start + size] for start in range(0, len(keys), size)]
    return {str(number): keys for number, keys in enumerate(packs)}


def stack_leaves(leaves: Sequence[Any]) -> Any:
    """Return a pack of leaves of one kind, `[leaves, *shape]`: a copy on the same devices."""
    if not isinstance(leaves[0], jax.Array):
        return np.stack(leaves)
    return _stack_program(pack_sharding(leaves[0].sharding))(tuple(leaves))


def compile_stack(leaves: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """Compile the program of `stack_leaves` for leaves of one type, and return the type of the pack."""
    sharding, first = pack_sharding(leaves[0].sharding), leaves[0]
    _stack_program(sharding).lower(tuple(leaves)).compile()  # JAX keeps the executable for the next call
    return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype, sharding=sharding)


def pack_sharding(sharding: Any) -> Any:
    """Return the sharding of a pack of leaves with sharding `sharding`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)


def pack_target(count: int, targets: Sequence[Any]) -> Any:
    """Return the type with which to read a pack.

    Args:
        count: number of leaves in the pack.
        targets: the types of the requested leaves, each a `ShapeDtypeStruct` or `np.ndarray`.

    Returns:
        A `ShapeDtypeStruct` if all requested leaves have the same sharding, else `np.ndarray`.
    """
    first = targets[0]
    if any(target is np.ndarray or target.sharding != first.sharding for target in targets) or not _is_stackable(
        first.sharding
    ):
        return np.ndarray
    return jax.ShapeDtypeStruct((count, *first.shape), first.dtype, sharding=pack_sharding(first.sharding))


def unpack_leaves(pack: Any, wanted: Mapping[int, Any]) -> dict[int, Any]:
    """Return leaves of a pack, each with the sharding of its target.

    Args:
        pack: `[leaves, *shape]`, of the type that `pack_target` returns for these targets.
        wanted: index -> target of the requested leaves.
    """
    if isinstance(pack, jax.Array):
        return _split(pack, next(iter(wanted.values())).sharding, sorted(wanted))
    # Copies, because a view of one leaf would keep the whole pack in memory.
    leaves: dict[int, Any] = {index: np.array(pack[index]) for index in wanted}
    placed = [index for index, target in wanted.items() if target is not np.ndarray]
    values, shardings = [leaves[index] for index in placed], [wanted[index].sharding for index in placed]
    return leaves | dict(zip(placed, _put(values, shardings), strict=True))


def _put(values: list[np.ndarray], shardings: list[Any]) -> list[jax.Array]:
    """Put arrays, of which each process has all elements, on shardings."""
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)
    return [
        jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        for value, sharding in zip(values, shardings, strict=True)
    ]


def _split(pack: jax.Array, sharding: Any, wanted: Sequence[int]) -> dict[int, jax.Array]:
    size = min(LEAVES_PER_SPLIT, pack.shape[0])
    leaves: dict[int, jax.Array] = {}
    for index in wanted:
        if index not in leaves:
            first = min(index, pack.shape[0] - size)  # the last call repeats leaves instead of taking fewer
            some = _split_program(sharding, size)(pack, np.int32(first))
            leaves |= zip(range(first, first + size), some, strict=True)
    return {index: leaves[index] for index in wanted}


@functools.lru_cache(maxsize=64)
def _stack_program(sharding: Any) -> Any:
    def stack(leaves: tuple[jax.Array, ...]) -> jax.Array:
        return _from_unsigned(
            lax.concatenate([lax.expand_dims(_unsigned(leaf), (0,)) for leaf in leaves], 0), leaves[0].dtype
        )

    return jax.jit(stack, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _split_program(sharding: Any, size: int) -> Any:
    def split(pack: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
        words = _unsigned(pack)
        leaves = (lax.dynamic_index_in_dim(words, first + number, 0, keepdims=False) for number in range(size))
        return tuple(_from_unsigned(leaf, pack.dtype) for leaf in leaves)

    return jax.jit(split, out_shardings=sharding)


def _unsigned(array: jax.Array) -> jax.Array:
    """Bitcast floats to unsigned integers, float64 to two words, because uint64 needs x64. Keep other types."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return lax.bitcast_convert_type(array, f"uint{min(bits_of(array.dtype), 32)}")


def _from_unsigned(words: jax.Array, dtype: Any) -> jax.Array:
    """Invert `_unsigned`."""
    return lax.bitcast_convert_type(words, dtype) if jnp.issubdtype(dtype, jnp.floating) else words


def _nbytes(array: Any) -> int:
    return -(-math.prod(array.shape) * bits_of(array.dtype) // 8)


def _is_packable(array: Any) -> bool:
    # XLA aborts the process when it concatenates some types of less than 8 bits.
    if array.ndim == MAX_DIMS or bits_of(array.dtype) < 8:
        return False
    return _nbytes(array) < PACKABLE_BYTES and (not isinstance(array, jax.Array) or _is_stackable(array.sharding))


def _is_stackable(sharding: Any) -> bool:
    """Return whether a program can stack leaves: they are in device memory, on a mesh or on one device."""
    return isinstance(sharding, (NamedSharding, SingleDeviceSharding)) and on_device(sharding)
