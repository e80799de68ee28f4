r"""A digest of an array that is the same on every mesh, computed where its shards are.

With the array's bits cut into 32-bit words :math:`w_p` (row-major position :math:`p` in the *whole* array),

.. math:: D = \sum_p \mathrm{mix}(w_p + p \cdot c) \bmod 2^{32}

where `mix` is murmur3's finaliser, a bijection of 32-bit words. Changing one element always changes D; any
other damage leaves it as it was with probability 2^-32. A sum is the same in any order, so each shard adds up
its own part, and the parts are added on the host: no gathering, and no collective that could meet another
program's on the devices (two programs with collectives in flight can starve XLA:CPU's threads, and a digest
runs behind the next train step).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.ckpt.state.named_leaves import bits_of
from autoshard.sharding.plan.replication import replicated_axes, sharded_axes

_STEP = 0x9E3779B1
_MASK = 0xFFFFFFFF
_BLOCK = 2**16  # elements of a NumPy array at once
_BATCH = 64  # leaves of one program: compiling takes some milliseconds for each
_MOVED_BYTES = 64 * 2**20  # of leaves in host memory that are copied to the devices at once


def _mix(word: Any, position: Any) -> Any:
    """Murmur3's finaliser of (word, position), on NumPy and JAX arrays of uint32 alike."""
    word = word + position * np.uint32(_STEP)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element as uint32 words, low word first."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [*_words(array.real), *_words(array.imag)]
    if dtype == np.bool_:
        return [array.astype(jnp.uint32)]
    bits = bits_of(dtype)
    if bits < 8:  # packed types: any injective widening will do
        wide = jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
        return _words(array.astype(wide if jnp.issubdtype(dtype, jnp.integer) else jnp.float32))
    if bits == 64:
        pair = lax.bitcast_convert_type(array, jnp.uint32)
        return [pair[..., 0], pair[..., 1]]
    return [lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)]


def shard_digest(shard: jax.Array, shape: Sequence[int], offsets: Sequence[Any]) -> jax.Array:
    """A shard's part of its array's digest (traceable).

    Args:
        shard: the elements that are here.
        shape: the shape of the whole array.
        offsets: where the shard begins in each dimension, integers or traced scalars.

    Returns:
        A uint32 scalar.
    """
    position, stride = jnp.zeros(shard.shape, jnp.uint32), 1
    for dim in reversed(range(shard.ndim)):
        here = lax.broadcasted_iota(jnp.uint32, shard.shape, dim) + jnp.asarray(offsets[dim], jnp.uint32)
        position = position + here * np.uint32(stride & _MASK)
        stride *= shape[dim]
    words = _words(shard)
    total = jnp.zeros((), jnp.uint32)
    for order, word in enumerate(words):
        place = position * np.uint32(len(words)) + np.uint32(order)
        total = total + jnp.sum(_mix(word, place), dtype=jnp.uint32)
    return total


def host_digest(array: np.ndarray) -> int:
    """The same digest of a NumPy array, by NumPy; a block after the other, so that it takes little memory."""
    flat = np.ascontiguousarray(array).reshape(-1)
    total = 0
    for at in range(0, flat.size, _BLOCK):
        words = _host_words(flat[at : at + _BLOCK])
        first = at * (words.size // min(_BLOCK, flat.size - at))
        place = ((np.arange(words.size, dtype=np.uint64) + np.uint64(first)) & np.uint64(_MASK)).astype(np.uint32)
        total += int(_mix(words, place).sum(dtype=np.uint64))
    return total & _MASK


def _host_words(flat: np.ndarray) -> np.ndarray:
    """The bits of a flat NumPy array as uint32 words, low word first."""
    dtype = flat.dtype
    if dtype != np.bool_ and not np.issubdtype(dtype, np.complexfloating) and bits_of(dtype) < 8:
        integer, signed = jnp.issubdtype(dtype, jnp.integer), jnp.issubdtype(dtype, jnp.signedinteger)
        flat = flat.astype((np.int8 if signed else np.uint8) if integer else np.float32)
    return flat.view(f"<u{min(flat.dtype.itemsize, 4)}").astype(np.uint32)


def _sealed(parts: jax.Array) -> jax.Array:
    """A row of digests [n] -> [n + 1]: the row's own digest behind it, so that damage to it shows."""
    seal = shard_digest(parts, parts.shape, (0,))
    return jnp.concatenate([parts, seal[None]])


def digest_group(sharding: Any) -> Hashable:
    """Leaves of equal groups share a program: the mesh, or the sharding itself where it has none."""
    return sharding.mesh if isinstance(sharding, NamedSharding) else sharding


def digests(leaves: Sequence[jax.Array], packs: Sequence[jax.Array] = ()) -> jax.Array:
    """Parts of the digests of leaves of one group, one row a device.

    Leaves in host memory are copied to the devices for it, some at a time: a program cannot mix the two.

    Args:
        leaves: n arrays whose `digest_group` is the same. They are only read.
        packs: arrays [m, *shape] of the same group, of m leaves each, whose first dimension is not sharded.

    Returns:
        uint32 [devices, n + all m + 1], a row on each device of the mesh; `total` adds them up.
    """
    sharding = (*leaves, *packs)[0].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    parts: list[jax.Array] = []
    order: list[int] = []
    for numbers in batches([(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves], _BATCH):
        for some in _bounded(numbers, leaves):
            moved = [number for number in some if not on_device(leaves[number].sharding)]
            copies = jax.device_put([leaves[i] for i in moved], [_device_sharding(leaves[i].sharding) for i in moved])
            here = dict(zip(moved, copies, strict=True))
            batch = tuple(here.get(number, leaves[number]) for number in some)
            parts.append(_parts_program(mesh, tuple(map(_spec, batch)))(batch))
            if moved:  # else all copies would be in flight together
                jax.block_until_ready(parts[-1])
            order += some
    for pack in packs:
        parts.append(_pack_program(mesh, _spec(pack))(pack))
        order += range(len(order), len(order) + pack.shape[0])
    return _seal_program(mesh, tuple(np.argsort(order).tolist()))(tuple(parts))


@functools.lru_cache(maxsize=1024)  # asked for thousands of leaves, of a few shardings
def on_device(sharding: Any) -> bool:
    """Whether arrays lie in the devices' own memory, where programs take them."""
    return sharding.memory_kind is None or sharding.memory_kind == _default_memory(sharding)


def _device_sharding(sharding: Any) -> Any:
    return sharding.with_memory_kind(_default_memory(sharding))


def _default_memory(sharding: Any) -> str:
    return next(iter(sharding.device_set)).default_memory().kind


def _bounded(numbers: Sequence[int], leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Cuts a batch where what has to be moved of it would take more than `_MOVED_BYTES`, or a single leaf."""
    cut: list[list[int]] = [[]]
    nbytes = 0
    for number in numbers:
        more = 0 if on_device(leaves[number].sharding) else leaves[number].nbytes
        if cut[-1] and more and nbytes + more > _MOVED_BYTES:
            cut.append([])
            nbytes = 0
        cut[-1].append(number)
        nbytes += more
    return cut


def batches(kinds: Sequence[Hashable], size: int) -> list[list[int]]:
    """Positions in lists of at most `size`, those of one kind together: programs over many lists are few then.

    >>> batches(["a", "b", "a", "a", "b", "c"], 2)
    [[0, 2], [1, 4], [3, 5]]
    """
    by_kind: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(position)
    whole, rest = [], []
    for positions in by_kind.values():
        full = len(positions) // size * size
        whole += [positions[at : at + size] for at in range(0, full, size)]
        rest += positions[full:]
    return whole + [rest[at : at + size] for at in range(0, len(rest), size)]


def _spec(array: jax.Array) -> PartitionSpec:
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()


def _part(mesh: Mesh | None, spec: PartitionSpec, shard: jax.Array) -> jax.Array:
    """What a device adds to the digest of an array that lies on `mesh` by `spec`, from its shard."""
    if mesh is None:
        return shard_digest(shard, shard.shape, (0,) * shard.ndim)
    axes = [*sharded_axes(spec)] + [()] * (shard.ndim - len(spec))
    counts = [math.prod(mesh.shape[name] for name in names) for names in axes]
    shape = [size * count for size, count in zip(shard.shape, counts, strict=True)]
    offsets = [
        lax.axis_index(names).astype(jnp.uint32) * np.uint32(size & _MASK) if names else np.uint32(0)
        for names, size in zip(axes, shard.shape, strict=True)
    ]
    # One replica counts: the others hold the same elements.
    idle = replicated_axes(mesh.axis_names, spec)
    counted = lax.axis_index(idle) == 0 if idle else True
    return jnp.where(counted, shard_digest(shard, shape, offsets), np.uint32(0))


def _on_shards(mesh: Mesh | None, rows: Callable[..., jax.Array], specs: Any) -> Any:
    """A jitted function from shards to a row [1, n] on each device."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    # XLA:CPU cuts a sum into two, and writes what is summed to memory in between: as many bytes as the leaves have.
    options: Any = {"xla_disable_hlo_passes": "tree_reduction_rewriter"} if platform == "cpu" else None
    if mesh is None:
        return jax.jit(rows, compiler_options=options)
    out = PartitionSpec(tuple(mesh.axis_names))
    mapped = jax.shard_map(rows, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)
    return jax.jit(mapped, compiler_options=options)


@functools.lru_cache(maxsize=256)
def _parts_program(mesh: Mesh | None, specs: tuple[PartitionSpec, ...]) -> Any:
    """The jitted parts of the digests of leaves that lie on `mesh` by `specs`, or on one device."""

    def rows(leaves: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([_part(mesh, spec, leaf) for leaf, spec in zip(leaves, specs, strict=True)])[None]

    return _on_shards(mesh, rows, specs)


@functools.lru_cache(maxsize=256)
def _pack_program(mesh: Mesh | None, spec: PartitionSpec) -> Any:
    """The same of a pack's leaves."""

    def rows(pack: jax.Array) -> jax.Array:
        return jax.vmap(functools.partial(_part, mesh, PartitionSpec(*spec[1:])))(pack)[None]

    return _on_shards(mesh, rows, spec)


@functools.lru_cache(maxsize=64)
def _seal_program(mesh: Mesh | None, order: tuple[int, ...]) -> Any:
    """All parts in one row, in the order in which the leaves are, and its seal."""

    def rows(parts: tuple[jax.Array, ...]) -> jax.Array:
        row = jnp.concatenate([part[0] for part in parts])
        return _sealed(row if order == (*range(len(order)),) else row[np.array(order)])[None]

    return _on_shards(mesh, rows, PartitionSpec(tuple(mesh.axis_names)) if mesh is not None else None)


def total(rows: np.ndarray) -> np.ndarray | None:
    """The digests [n] from all rows [devices, n + 1]; None where a row is damaged."""
    if any(host_digest(row[:-1]) != row[-1] for row in rows):
        return None
    return (rows[:, :-1].sum(axis=0, dtype=np.uint64) & np.uint64(_MASK)).astype(np.uint32)
