"""Many small leaves as few arrays.

An array of its own costs Orbax some milliseconds, whatever its size. So where a state has many small leaves, those of
one kind (shape, dtype and sharding) are stacked into packs: arrays `[leaves, *shape]` that are sharded as the leaves
are, so that no element leaves its device, and a process writes of a pack what it has of the leaves. Programs take a
bounded number of leaves of one kind: what has to be compiled does not grow with the number of leaves. The programs
move floats as unsigned integers, since XLA may change a NaN's bits where it concatenates or slices.
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
from autoshard.ckpt.state.named_leaves import PACKS, Key, bits_of

Place = tuple[str, int]  # the name of a pack, and which of its leaves

SMALL_BYTES = 2**20  # writing this takes about as long as what Orbax does once an array
FEW = 64  # small leaves that stay as they are: so many cost a tenth of a second, and plain Orbax has them by path
ALIKE = 8  # leaves of one kind that are worth a program
PACK_LEAVES = 256  # compiling a stack takes a millisecond a leaf
PACK_BYTES = 32 * 2**20  # in memory at once where leaves are read one by one
MOST_DIMS = 31  # that TensorStore writes
_SPLIT = 16  # leaves that one call takes out of a pack: compiling takes 20 ms each, a call 0.5 ms


def packs_of(arrays: Mapping[Key, Any]) -> dict[str, list[Key]]:
    """Which leaves go into which pack; the others stay as they are.

    Args:
        arrays: all leaves with elements; the same ones in every process.
    """
    if any(key[:1] == (PACKS,) for key in arrays):  # a pack would take the place of that leaf
        return {}
    kinds: dict[Hashable, list[Key]] = {}
    for key, array in arrays.items():
        kinds.setdefault((array.shape, array.dtype, getattr(array, "sharding", None)), []).append(key)
    small = [keys for keys in kinds.values() if _packable(arrays[keys[0]])]
    if sum(map(len, small)) <= FEW:
        return {}
    packs = []
    for keys in small:
        if len(keys) >= ALIKE:
            most = max(min(PACK_LEAVES, PACK_BYTES // _nbytes(arrays[keys[0]])), 1)
            count = math.ceil(len(keys) / most)
            size = math.ceil(len(keys) / count)  # as equal as can be: each other size is compiled once more
            packs += [keys[at : at + size] for at in range(0, len(keys), size)]
    return {str(number): keys for number, keys in enumerate(packs)}


def stacked(leaves: Sequence[Any]) -> Any:
    """A pack of leaves of one kind: `[leaves, *shape]`, a copy where they are."""
    if not isinstance(leaves[0], jax.Array):
        return np.stack(leaves)
    return _stack_program(pack_sharding(leaves[0].sharding))(tuple(leaves))


def pack_sharding(sharding: Any) -> Any:
    """The sharding of a pack of leaves that lie by `sharding`."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)


def pack_target(count: int, targets: Sequence[Any]) -> Any:
    """As what a pack of so many leaves is best read for the leaves that are wanted of it.

    Args:
        count: leaves in the pack.
        targets: of the wanted leaves, each a `ShapeDtypeStruct` or `np.ndarray`.

    Returns:
        A `ShapeDtypeStruct` where all are wanted on one sharding, else `np.ndarray`.
    """
    first = targets[0]
    if any(target is np.ndarray or target.sharding != first.sharding for target in targets) or not _splits(
        first.sharding
    ):
        return np.ndarray
    return jax.ShapeDtypeStruct((count, *first.shape), first.dtype, sharding=pack_sharding(first.sharding))


def taken(pack: Any, wanted: Mapping[int, Any]) -> dict[int, Any]:
    """Leaves of a pack, each on its target's sharding.

    Args:
        pack: `[leaves, *shape]`, as `pack_target` says it for these targets.
        wanted: which leaves, and as what.
    """
    if isinstance(pack, jax.Array):
        return _split(pack, next(iter(wanted.values())).sharding, sorted(wanted))
    # A copy, so that one leaf does not keep the whole pack in memory.
    found: dict[int, Any] = {index: np.array(pack[index]) for index in wanted}
    placed = [index for index, target in wanted.items() if target is not np.ndarray]
    values, shardings = [found[index] for index in placed], [wanted[index].sharding for index in placed]
    return found | dict(zip(placed, _put(values, shardings), strict=True))


def _put(values: list[np.ndarray], shardings: list[Any]) -> list[jax.Array]:
    """Arrays that every process has whole, on shardings."""
    if jax.process_count() == 1:
        return jax.device_put(values, shardings)
    return [
        jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        for value, sharding in zip(values, shardings, strict=True)
    ]


def _split(pack: jax.Array, sharding: Any, wanted: Sequence[int]) -> dict[int, jax.Array]:
    size = min(_SPLIT, pack.shape[0])
    found: dict[int, jax.Array] = {}
    for index in wanted:
        if index not in found:
            first = min(index, pack.shape[0] - size)  # the last call takes some once more rather than fewer
            leaves = _split_program(sharding, size)(pack, np.int32(first))
            found |= zip(range(first, first + size), leaves, strict=True)
    return {index: found[index] for index in wanted}


@functools.lru_cache(maxsize=64)
def _stack_program(sharding: Any) -> Any:
    def stack(leaves: tuple[jax.Array, ...]) -> jax.Array:
        return _floats(lax.concatenate([lax.expand_dims(_unsigned(leaf), (0,)) for leaf in leaves], 0), leaves[0].dtype)

    return jax.jit(stack, out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _split_program(sharding: Any, size: int) -> Any:
    def split(pack: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
        words = _unsigned(pack)
        leaves = (lax.dynamic_index_in_dim(words, first + number, 0, keepdims=False) for number in range(size))
        return tuple(_floats(leaf, pack.dtype) for leaf in leaves)

    return jax.jit(split, out_shardings=sharding)


def _unsigned(array: jax.Array) -> jax.Array:
    """The bits of floats, 64 of them as two words: without x64 there is no wider type. Other types as they are."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return lax.bitcast_convert_type(array, f"uint{min(bits_of(array.dtype), 32)}")


def _floats(words: jax.Array, dtype: Any) -> jax.Array:
    """What `_unsigned` was given, again."""
    return lax.bitcast_convert_type(words, dtype) if jnp.issubdtype(dtype, jnp.floating) else words


def _nbytes(array: Any) -> int:
    return -(-math.prod(array.shape) * bits_of(array.dtype) // 8)


def _packable(array: Any) -> bool:
    if (
        array.ndim == MOST_DIMS or bits_of(array.dtype) < 8
    ):  # XLA aborts the process where it concatenates some of these
        return False
    return _nbytes(array) < SMALL_BYTES and (not isinstance(array, jax.Array) or _splits(array.sharding))


def _splits(sharding: Any) -> bool:
    """Whether leaves lie so that a program can stack them: in the devices' own memory, on a mesh or on one device."""
    return isinstance(sharding, (NamedSharding, SingleDeviceSharding)) and on_device(sharding)
