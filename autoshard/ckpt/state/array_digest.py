r"""A digest of an array that does not depend on its sharding, computed on the shards.

With the array's bits as 32-bit words :math:`w_p` (row-major position :math:`p` in the *whole* array),

.. math:: D = \sum_p \mathrm{mix}(w_p + p \cdot c) \bmod 2^{32}

where `mix` is murmur3's finalizer, a bijection of 32-bit words. Changing one word always changes D; other damage
leaves D unchanged with probability 2^-32. A sum does not depend on the order, so each device sums its shard, and the
host adds the partial sums. There are no collectives: a digest runs concurrently with the next train step, and two
programs with collectives in flight can starve XLA:CPU's threads.
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

from autoshard.ckpt.state.constants import DIGEST_BLOCK_ELEMENTS, LEAVES_PER_DIGEST, MAX_MOVED_BYTES
from autoshard.ckpt.state.named_leaves import bits_of
from autoshard.sharding.plan.replication import replicated_axes, sharded_axes

_STEP = 0x9E3779B1
_MASK = 0xFFFFFFFF


def _mix(word: Any, position: Any) -> Any:
    """Return murmur3's finalizer of (word, position), for uint32 arrays of NumPy or JAX."""
    word = word + position * np.uint32(_STEP)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def _words(array: jax.Array) -> list[jax.Array]:
    """Return the bits of each element as uint32 words, low word first."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [*_words(array.real), *_words(array.imag)]
    if dtype == np.bool_:
        return [array.astype(jnp.uint32)]
    bits = bits_of(dtype)
    if bits < 8:  # packed types: any injective widening works
        wide = jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
        return _words(array.astype(wide if jnp.issubdtype(dtype, jnp.integer) else jnp.float32))
    if bits == 64:
        pair = lax.bitcast_convert_type(array, jnp.uint32)
        return [pair[..., 0], pair[..., 1]]
    return [lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)]


def shard_digest(shard: jax.Array, shape: Sequence[int], offsets: Sequence[Any]) -> jax.Array:
    """Return the partial digest of a shard; traceable.

    Args:
        shard: the elements of the shard.
        shape: the shape of the whole array.
        offsets: the index of the shard's first element in each dimension, integers or traced scalars.

    Returns:
        A uint32 scalar.
    """
    position, stride = jnp.zeros(shard.shape, jnp.uint32), 1
    for dim in reversed(range(shard.ndim)):
        index = lax.broadcasted_iota(jnp.uint32, shard.shape, dim) + jnp.asarray(offsets[dim], jnp.uint32)
        position = position + index * np.uint32(stride & _MASK)
        stride *= shape[dim]
    words = _words(shard)
    total = jnp.zeros((), jnp.uint32)
    for order, word in enumerate(words):
        word_position = position * np.uint32(len(words)) + np.uint32(order)
        total = total + jnp.sum(_mix(word, word_position), dtype=jnp.uint32)
    return total


def host_digest(array: np.ndarray) -> int:
    """Return the digest of a NumPy array, computed by NumPy in blocks to save memory."""
    flat = np.ascontiguousarray(array).reshape(-1)
    total = 0
    for start in range(0, flat.size, DIGEST_BLOCK_ELEMENTS):
        words = _host_words(flat[start : start + DIGEST_BLOCK_ELEMENTS])
        first = start * (words.size // min(DIGEST_BLOCK_ELEMENTS, flat.size - start))
        positions = ((np.arange(words.size, dtype=np.uint64) + np.uint64(first)) & np.uint64(_MASK)).astype(np.uint32)
        total += int(_mix(words, positions).sum(dtype=np.uint64))
    return total & _MASK


def _host_words(flat: np.ndarray) -> np.ndarray:
    """Return the bits of a flat NumPy array as uint32 words, low word first."""
    dtype = flat.dtype
    if dtype != np.bool_ and not np.issubdtype(dtype, np.complexfloating) and bits_of(dtype) < 8:
        integer, signed = jnp.issubdtype(dtype, jnp.integer), jnp.issubdtype(dtype, jnp.signedinteger)
        flat = flat.astype((np.int8 if signed else np.uint8) if integer else np.float32)
    return flat.view(f"<u{min(flat.dtype.itemsize, 4)}").astype(np.uint32)


def _with_checksum(parts: jax.Array) -> jax.Array:
    """Append to a row of digests [n] the digest of the row, which detects damage to it."""
    checksum = shard_digest(parts, parts.shape, (0,))
    return jnp.concatenate([parts, checksum[None]])


def digest_group(sharding: Any) -> Hashable:
    """Return the mesh of a sharding, or the sharding if it has none. One program can digest the leaves of a group."""
    return sharding.mesh if isinstance(sharding, NamedSharding) else sharding


def digests(
    leaves: Sequence[jax.Array], packs: Sequence[jax.Array] = (), on_dispatch: Callable[[], object] = bool
) -> jax.Array:
    """Return the partial digests of leaves of one group, one row per device.

    Leaves in host memory are copied to the devices first, because a program cannot mix memory kinds.

    Args:
        leaves: n arrays with the same `digest_group`. They are not donated.
        packs: arrays [m, *shape] of the same group, of m leaves each, whose first dimension is not sharded.
        on_dispatch: called right before the first program is dispatched.

    Returns:
        uint32 [devices, n + sum of all m + 1], a row on each device of the mesh; `total` adds the rows.
    """
    mesh, batches_of_leaves = _mesh_of(leaves, packs), _leaf_batches(leaves)
    if _is_one_program(leaves, packs, batches_of_leaves):
        program, arguments = _whole_program(mesh, tuple(map(_spec, leaves))), tuple(leaves)
        on_dispatch()
        return program(arguments)
    on_dispatch()
    parts: list[jax.Array] = []
    for numbers in batches_of_leaves:
        moved = [number for number in numbers if not on_device(leaves[number].sharding)]
        copies = jax.device_put([leaves[i] for i in moved], [_device_sharding(leaves[i].sharding) for i in moved])
        on_devices = dict(zip(moved, copies, strict=True))
        batch = tuple(on_devices.get(number, leaves[number]) for number in numbers)
        parts.append(_parts_program(mesh, tuple(map(_spec, batch)))(batch))
        if moved:  # else all copies would be in memory at the same time
            jax.block_until_ready(parts[-1])
    parts += [_pack_program(mesh, _spec(pack))(pack) for pack in packs]
    return _row_program(mesh, _row_order(batches_of_leaves, packs))(tuple(parts))


def compile_digests(leaves: Sequence[Any], packs: Sequence[Any] = ()) -> None:
    """Compile the programs of `digests` for arguments of these types, arrays or `ShapeDtypeStruct`s."""
    mesh, batches_of_leaves = _mesh_of(leaves, packs), _leaf_batches(leaves)
    parts: list[Any] = []
    if _is_one_program(leaves, packs, batches_of_leaves):
        _compile(_whole_program(mesh, tuple(map(_spec, leaves))), tuple(map(_on_devices, leaves)))
        return
    for numbers in batches_of_leaves:
        batch = tuple(_on_devices(leaves[number]) for number in numbers)
        parts.append(_compile(_parts_program(mesh, tuple(map(_spec, batch))), batch))
    parts += [_compile(_pack_program(mesh, _spec(pack)), _on_devices(pack)) for pack in packs]
    _compile(_row_program(mesh, _row_order(batches_of_leaves, packs)), tuple(parts))


def _kind(array: Any) -> Hashable:
    return tuple(array.shape), array.dtype, array.sharding


def _compile(program: Any, arguments: Any) -> jax.ShapeDtypeStruct:
    """Compile a program, and return the type of its result. JAX keeps the executable for the next call."""
    lowered = program.lower(arguments)
    result = lowered.out_info
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=lowered.compile().output_shardings)


def _on_devices(array: Any) -> jax.ShapeDtypeStruct:
    sharding = array.sharding if on_device(array.sharding) else _device_sharding(array.sharding)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _mesh_of(leaves: Sequence[Any], packs: Sequence[Any]) -> Any:
    """Return the mesh of arrays of one group, or None if they are on one device."""
    return getattr((*leaves, *packs)[0].sharding, "mesh", None)


def _leaf_batches(leaves: Sequence[Any]) -> list[list[int]]:
    """Return the positions of the leaves that each program digests."""
    alike = batches([_kind(leaf) for leaf in leaves], LEAVES_PER_DIGEST)
    return [numbers for batch in alike for numbers in _limit_moved_bytes(batch, leaves)]


def _is_one_program(leaves: Sequence[Any], packs: Sequence[Any], batches_of_leaves: Sequence[Sequence[int]]) -> bool:
    """Return whether one program computes the whole row. On virtual devices, programs wait for each other."""
    return len(batches_of_leaves) == 1 and not packs and all(on_device(leaf.sharding) for leaf in leaves)


def _row_order(batches_of_leaves: Sequence[Sequence[int]], packs: Sequence[Any]) -> tuple[int, ...]:
    """Return the position of each leaf's digest in the results of all programs, one after the other."""
    order = [number for numbers in batches_of_leaves for number in numbers]
    for pack in packs:
        order += range(len(order), len(order) + pack.shape[0])
    return tuple(np.argsort(order).tolist())


@functools.lru_cache(maxsize=1024)  # called for thousands of leaves of a few shardings
def on_device(sharding: Any) -> bool:
    """Return whether arrays are in the default memory of their devices, where programs can read them."""
    return sharding.memory_kind is None or sharding.memory_kind == _default_memory(sharding)


def _device_sharding(sharding: Any) -> Any:
    return sharding.with_memory_kind(_default_memory(sharding))


def _default_memory(sharding: Any) -> str:
    return next(iter(sharding.device_set)).default_memory().kind


def _limit_moved_bytes(numbers: Sequence[int], leaves: Sequence[Any]) -> list[list[int]]:
    """Split a batch so that each part moves at most `MAX_MOVED_BYTES`, or a single leaf, to the devices."""
    parts: list[list[int]] = [[]]
    moved_bytes = 0
    for number in numbers:
        nbytes = 0 if on_device(leaves[number].sharding) else _nbytes(leaves[number])
        if parts[-1] and nbytes and moved_bytes + nbytes > MAX_MOVED_BYTES:
            parts.append([])
            moved_bytes = 0
        parts[-1].append(number)
        moved_bytes += nbytes
    return parts


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def batches(kinds: Sequence[Hashable], size: int) -> list[list[int]]:
    """Split positions into lists of at most `size`, mostly of one kind, so that few different programs are compiled.

    >>> batches(["a", "b", "a", "a", "b", "c"], 2)
    [[0, 2], [1, 4], [3, 5]]
    """
    by_kind: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(position)
    full, rest = [], []
    for positions in by_kind.values():
        end = len(positions) // size * size
        full += [positions[start : start + size] for start in range(0, end, size)]
        rest += positions[end:]
    return full + [rest[start : start + size] for start in range(0, len(rest), size)]


def _spec(array: Any) -> PartitionSpec:
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()


def _part(mesh: Mesh | None, spec: PartitionSpec, shard: jax.Array) -> jax.Array:
    """Return the partial digest that a device adds for an array with sharding `spec` on `mesh`, from its shard."""
    if mesh is None:
        return shard_digest(shard, shard.shape, (0,) * shard.ndim)
    axes = [*sharded_axes(spec)] + [()] * (shard.ndim - len(spec))
    counts = [math.prod(mesh.shape[name] for name in names) for names in axes]
    shape = [size * count for size, count in zip(shard.shape, counts, strict=True)]
    offsets = [
        lax.axis_index(names).astype(jnp.uint32) * np.uint32(size & _MASK) if names else np.uint32(0)
        for names, size in zip(axes, shard.shape, strict=True)
    ]
    # Count one replica only: the others have the same elements.
    replicas = replicated_axes(mesh.axis_names, spec)
    counted = lax.axis_index(replicas) == 0 if replicas else True
    return jnp.where(counted, shard_digest(shard, shape, offsets), np.uint32(0))


def _on_shards(mesh: Mesh | None, rows: Callable[..., jax.Array], specs: Any) -> Any:
    """Jit a function from shards to a row [1, n] on each device."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    # XLA:CPU splits a sum into two and writes the summands to memory in between, as many bytes as the leaves have.
    options: Any = {"xla_disable_hlo_passes": "tree_reduction_rewriter"} if platform == "cpu" else None
    if mesh is None:
        return jax.jit(rows, compiler_options=options)
    out = PartitionSpec(tuple(mesh.axis_names))
    mapped = jax.shard_map(rows, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False)
    return jax.jit(mapped, compiler_options=options)


@functools.lru_cache(maxsize=256)
def _parts_program(mesh: Mesh | None, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return the program for the partial digests of leaves with shardings `specs` on `mesh`, or on one device."""

    def rows(leaves: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([_part(mesh, spec, leaf) for leaf, spec in zip(leaves, specs, strict=True)])[None]

    return _on_shards(mesh, rows, specs)


@functools.lru_cache(maxsize=256)
def _whole_program(mesh: Mesh | None, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return the program for the row of `digests` of leaves with shardings `specs`, without packs."""

    def rows(leaves: tuple[jax.Array, ...]) -> jax.Array:
        parts = jnp.stack([_part(mesh, spec, leaf) for leaf, spec in zip(leaves, specs, strict=True)])
        return _with_checksum(parts)[None]

    return _on_shards(mesh, rows, specs)


@functools.lru_cache(maxsize=256)
def _pack_program(mesh: Mesh | None, spec: PartitionSpec) -> Any:
    """Return the program for the partial digests of the leaves of a pack."""

    def rows(pack: jax.Array) -> jax.Array:
        return jax.vmap(functools.partial(_part, mesh, PartitionSpec(*spec[1:])))(pack)[None]

    return _on_shards(mesh, rows, spec)


@functools.lru_cache(maxsize=64)
def _row_program(mesh: Mesh | None, order: tuple[int, ...]) -> Any:
    """Return the program that concatenates partial digests in the order of the leaves and appends a checksum."""

    def rows(parts: tuple[jax.Array, ...]) -> jax.Array:
        row = jnp.concatenate([part[0] for part in parts])
        return _with_checksum(row if order == (*range(len(order)),) else row[np.array(order)])[None]

    return _on_shards(mesh, rows, PartitionSpec(tuple(mesh.axis_names)) if mesh is not None else None)


def total(rows: np.ndarray) -> np.ndarray | None:
    """Return the digests [n] from the rows [devices, n + 1] of `digests`; None if a row is damaged."""
    if any(host_digest(row[:-1]) != row[-1] for row in rows):
        return None
    return (rows[:, :-1].sum(axis=0, dtype=np.uint64) & np.uint64(_MASK)).astype(np.uint32)
