"""A state at one moment, safe from what the next train step does to its buffers."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autoshard import _compat
from autoshard._columns import listing
from autoshard._gc import paused
from autoshard._processes import exchange
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.state.array_packing import MOST_DIMS, Place, packs_of, stacked
from autoshard.ckpt.state.named_leaves import Key, LeafSpec, is_text, is_typed_key, leaf_spec, named_leaves, text_bytes
from autoshard.errors import CheckpointError

HOST = "host"
_WRITABLE = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 "
    "complex64 complex128".split()
)  # what TensorStore has of NumPy's and JAX's types


@dataclass(frozen=True)
class Snapshot:
    """What is written of a state.

    Attributes:
        specs: every leaf.
        arrays: the leaves that have elements and are not packed, RNG keys as their bits.
        groups: names of groups of leaves that share a mesh, and the leaves of each; packed ones last, pack by pack.
        packs: arrays [leaves, *shape] of many small leaves; see `packs`.
        places: for each packed leaf its pack, and which of it.
        layouts: for each leaf on a mesh its `PartitionSpec`, as text.
        meshes: the sizes of the axes of those meshes.
    """

    specs: tuple[LeafSpec, ...]
    arrays: dict[Key, Any]
    groups: dict[str, list[Key]]
    packs: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    layouts: dict[Key, str] = field(default_factory=dict)
    meshes: tuple[dict[str, int], ...] = ()

    @property
    def digests(self) -> dict[Key, tuple[str, int]]:
        """For each array its group and its column in `digest_rows`."""
        return {key: (group, column) for group, keys in self.groups.items() for column, key in enumerate(keys)}

    def digest_rows(self) -> dict[str, Any]:
        """Per group uint32 [devices, leaves + 1], computed where the leaves are; see `digest.digests`."""
        rows = {}
        for group, keys in self.groups.items():
            rows[group] = self.host_row[None] if group == HOST else array_digest.digests(*self._of(keys))
        return rows

    @functools.cached_property
    def host_row(self) -> np.ndarray:
        """That of the leaves in host memory, uint32 [leaves + 1]; several processes compare it before they write."""
        single, packs = self._of(self.groups.get(HOST, []))
        return host_rows([*single, *(leaf for pack in packs for leaf in pack)])[0]

    def _of(self, keys: Sequence[Key]) -> tuple[list[Any], list[Any]]:
        """The arrays of a group: single leaves, and packs."""
        single = [self.arrays[key] for key in keys if key not in self.places]
        return single, [self.packs[name] for name in dict.fromkeys(self.places[key][0] for key in keys[len(single) :])]


def savable(state: Any) -> list[tuple[LeafSpec, Any]]:
    """Every leaf of a state with what it is, where all can be saved.

    Raises:
        CheckpointError: naming every leaf that cannot be saved, or whose buffer was donated already.
    """
    found, wrong = [], []
    for key, leaf in named_leaves(state):
        reason = _valueless(leaf)
        if reason:
            wrong.append(f"{'/'.join(key)}: {reason}")
        else:
            found.append((leaf_spec(key, leaf), leaf))
    if wrong:
        raise CheckpointError(f"{len(wrong)} leaves of the state have no values to save:\n{listing(wrong)}")
    gone = [spec.name for spec, leaf in found if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if gone:
        raise CheckpointError(
            f"{len(gone)} leaves of the state were donated before the save:\n{listing(gone)}\n"
            "Save the state that the last step returned."
        )
    wrong = [f"{spec.name}: {spec}" for spec, _ in found if spec.stored and len(spec.bits().shape) > MOST_DIMS]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} leaves of the state have more than {MOST_DIMS} dimensions, which TensorStore cannot write:\n"
            f"{listing(wrong)}\nReshape them."
        )
    wrong = [f"{spec.name}: {_dtype(leaf)}" for spec, leaf in found if not _writable(spec)]
    if wrong:  # it would fail in the background, where no leaf is named
        raise CheckpointError(
            f"{len(wrong)} leaves of the state have a dtype that cannot be written:\n{listing(wrong)}\n"
            f"Save them as another one, for instance with `astype`. There are {', '.join(sorted(_WRITABLE))}."
        )
    return found


def _valueless(leaf: Any) -> str:
    """Why what looks like an array cannot be read as one, nothing where it can."""
    if _compat.is_tracer(leaf):
        return "is being traced: save what the compiled function returns"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array would lose its mask: save its `data` and its `mask`"
    if hasattr(leaf, "dtype") and not hasattr(leaf, "__array__") and not is_typed_key(leaf):
        return f"a {type(leaf).__name__} is no array: save the array that it stands for"
    return ""


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf).__name__)


def _writable(spec: LeafSpec) -> bool:
    return not spec.stored or spec.key_impl is not None or spec.is_text or spec.dtype in _WRITABLE


def check_alike(step: int, snapshot: Snapshot) -> None:
    """Refuses leaves in host memory that are not the same in every process, of which the first one's would be saved.

    Raises:
        CheckpointError: naming each of them, in every process.
    """
    if jax.process_count() == 1:
        return
    specs = {spec.key: str(spec) for spec in snapshot.specs}
    keys = snapshot.groups.get(HOST, [])
    held = [(key, specs[key], part) for key, part in zip(keys, snapshot.host_row.tolist(), strict=False)]
    what, told = f"compare what is in host memory of step {step}", json.dumps(held)
    if len({*exchange(what, hashlib.sha256(told.encode()).hexdigest())}) == 1:
        return
    # Only now all of it: there may be thousands of leaves.
    of_all = [{tuple(key): rest for key, *rest in json.loads(said)} for said in exchange(what, told)]
    names = dict.fromkeys(key for each in of_all for key in each)
    wrong = ["/".join(key) for key in names if any(each.get(key) != of_all[0].get(key) for each in of_all)]
    raise CheckpointError(
        f"{len(wrong)} leaves of the state are in each process's own memory, and not the same in every process:\n"
        f"{listing(wrong)}\nGather them, and save those of all processes in each; or make them arrays on a mesh."
    )


@paused()
def take_snapshot(leaves: Sequence[tuple[LeafSpec, Any]], *, copy: bool) -> Snapshot:
    """Describes a state's leaves (`savable`); with `copy` copies them, so that they may be donated at once.

    The copy is dispatched before this returns, and the runtime keeps a buffer alive for the copies and programs
    that were given it before its donation. Nothing here waits for the devices. Packs are copies in any case.
    """
    specs = tuple(spec for spec, _ in leaves)
    stored = {spec.key: _plain(leaf) for spec, leaf in leaves if spec.stored}
    members = packs_of(stored)
    places = {key: (name, index) for name, keys in members.items() for index, key in enumerate(keys)}
    packs = {name: stacked([stored[key] for key in keys]) for name, keys in members.items()}
    arrays = {key: leaf for key, leaf in stored.items() if key not in places}
    groups = {}
    for number, keys in enumerate(grouped({key: stored[key] for key in (*arrays, *places)})):
        groups[str(number) if isinstance(stored[keys[0]], jax.Array) else HOST] = keys
    if copy:
        arrays = copies(arrays)
    on_mesh = {
        spec.key: leaf.sharding for spec, leaf in leaves if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    layouts = {key: str(tuple(sharding.spec)) for key, sharding in on_mesh.items()}
    meshes = {tuple(sharding.mesh.shape.items()): None for sharding in on_mesh.values()}
    return Snapshot(specs, arrays, groups, packs, places, layouts, tuple(map(dict, meshes)))


def grouped(arrays: dict[Key, Any]) -> list[list[Key]]:
    """Paths of arrays that one program can digest together; those in NumPy form a group of their own."""
    groups: dict[Hashable, list[Key]] = {}
    for key, array in arrays.items():
        group = array_digest.digest_group(array.sharding) if isinstance(array, jax.Array) else HOST
        groups.setdefault(group, []).append(key)
    return list(groups.values())


def host_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """`digest.digests` of NumPy arrays, one row."""
    parts = np.array([array_digest.host_digest(array) for array in arrays], np.uint32)
    return np.append(parts, np.uint32(array_digest.host_digest(parts)))[None]


def _plain(leaf: Any) -> Any:
    """An array that Orbax writes: RNG keys as bits, texts as bytes; what only this process holds, as NumPy.

    In this machine's order of bytes.
    """
    if is_typed_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf) if jax.process_count() > 1 and leaf.is_fully_addressable else leaf
    array = text_bytes(leaf) if is_text(leaf) else np.asarray(leaf)
    return array if array.dtype.isnative else array.byteswap().view(array.dtype.newbyteorder())


def copies(arrays: Mapping[Key, Any]) -> dict[Key, Any]:
    """Copies, each where its array is; dispatched, not waited for."""
    made = {key: np.array(array) for key, array in arrays.items() if not isinstance(array, jax.Array)}
    on_devices = {key: array for key, array in arrays.items() if isinstance(array, jax.Array)}
    # The runtime's own copy: a program that copies would have to be compiled for each set of leaves.
    leaves, shardings = list(on_devices.values()), [array.sharding for array in on_devices.values()]
    made |= zip(on_devices, jax.device_put(leaves, shardings, may_alias=False), strict=True)
    return {key: made[key] for key in arrays}
