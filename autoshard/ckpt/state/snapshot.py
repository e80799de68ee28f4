"""A copy of a state that stays valid when the next train step donates its buffers."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autoshard import _compat
from autoshard._columns import listing
from autoshard._gc import paused
from autoshard._processes import exchange
from autoshard._shown import shown
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.state.array_packing import Place, assign_packs, compile_stack, stack_leaves
from autoshard.ckpt.state.constants import MAX_DIMS
from autoshard.ckpt.state.named_leaves import Key, LeafSpec, is_text, is_typed_key, leaf_spec, named_leaves, text_bytes
from autoshard.errors import CheckpointError

HOST = "host"
_WRITABLE = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 "
    "complex64 complex128".split()
)  # the types of NumPy and JAX that TensorStore supports


@shown
@dataclass(frozen=True)
class Snapshot:
    """A state in the form in which it is written.

    Attributes:
        specs: all leaves.
        arrays: the leaves that have elements and are not packed, RNG keys as their bits.
        groups: for each group of leaves on one mesh its leaves: first single ones, then packed ones, pack by pack.
        packs: arrays [leaves, *shape] of many small leaves; see `array_packing`.
        places: for each packed leaf the name of its pack, and its index in the pack.
        layouts: for each leaf on a mesh its `PartitionSpec`, as text.
        meshes: the axis sizes of these meshes.
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
        """The group of each leaf and its column in `digest_rows`."""
        return {key: (group, column) for group, keys in self.groups.items() for column, key in enumerate(keys)}

    def digest_rows(self, on_dispatch: Callable[[], object] = bool) -> dict[str, Any]:
        """Return for each group its `array_digest.digests`, uint32 [devices, leaves + 1].

        Args:
            on_dispatch: called right before a program is dispatched.
        """
        groups = sorted(self.groups, key=lambda group: group == HOST)  # those of the devices first
        return {
            group: self.host_row[None]
            if group == HOST
            else array_digest.digests(*self._of(self.groups[group]), on_dispatch=on_dispatch)
            for group in groups
        }

    @functools.cached_property
    def host_row(self) -> np.ndarray:
        """The row of the leaves in host memory, uint32 [leaves + 1]. Processes compare it before they write."""
        single, packs = self._of(self.groups.get(HOST, []))
        return host_digest_rows([*single, *(leaf for pack in packs for leaf in pack)])[0]

    def _of(self, keys: Sequence[Key]) -> tuple[list[Any], list[Any]]:
        """Return the single leaves and the packs of a group."""
        single = [self.arrays[key] for key in keys if key not in self.places]
        return single, [self.packs[name] for name in dict.fromkeys(self.places[key][0] for key in keys[len(single) :])]


def savable_leaves(state: Any) -> list[tuple[LeafSpec, Any]]:
    """Return all leaves of a state with their specs.

    Raises:
        CheckpointError: naming every leaf that cannot be saved, or whose buffer was donated.
    """
    leaves, wrong = [], []
    for key, leaf in named_leaves(state):
        reason = _no_value_reason(leaf)
        if reason:
            wrong.append(f"{'/'.join(key)}: {reason}")
        else:
            leaves.append((leaf_spec(key, leaf), leaf))
    if wrong:
        raise CheckpointError(f"{len(wrong)} leaves of the state have no values to save:\n{listing(wrong)}")
    donated = [spec.name for spec, leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    if donated:
        raise CheckpointError(
            f"{len(donated)} leaves of the state were donated before the save:\n{listing(donated)}\n"
            "Save the state that the last step returned."
        )
    wrong = [f"{spec.name}: {spec}" for spec, _ in leaves if spec.stored and len(spec.bits().shape) > MAX_DIMS]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} leaves of the state have more than {MAX_DIMS} dimensions, which TensorStore cannot write:\n"
            f"{listing(wrong)}\nReshape them."
        )
    wrong = [f"{spec.name}: {_dtype(leaf)}" for spec, leaf in leaves if not _writable(spec)]
    if wrong:  # TensorStore would fail in the background and not name the leaf
        raise CheckpointError(
            f"{len(wrong)} leaves of the state have a dtype that cannot be written:\n{listing(wrong)}\n"
            f"Cast them, for instance with `astype`, to one of {', '.join(sorted(_WRITABLE))}."
        )
    return leaves


def _no_value_reason(leaf: Any) -> str:
    """Return why a leaf with a dtype has no values to save; empty if it has values."""
    if _compat.is_tracer(leaf):
        return "is being traced: save the result of the compiled function"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array would lose its mask: save its `data` and its `mask`"
    if hasattr(leaf, "dtype") and not hasattr(leaf, "__array__") and not is_typed_key(leaf):
        return f"a {type(leaf).__name__} is not an array: save the array that it describes"
    return ""


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf).__name__)


def _writable(spec: LeafSpec) -> bool:
    return not spec.stored or spec.key_impl is not None or spec.is_text or spec.dtype in _WRITABLE


def check_same_in_all_processes(step: int, snapshot: Snapshot) -> None:
    """Check that leaves in host memory are the same in every process, because only those of process 0 are saved.

    Raises:
        CheckpointError: in every process, naming each leaf that differs.
    """
    if jax.process_count() == 1:
        return
    specs = {spec.key: str(spec) for spec in snapshot.specs}
    keys = snapshot.groups.get(HOST, [])
    leaves = [(key, specs[key], digest) for key, digest in zip(keys, snapshot.host_row.tolist(), strict=False)]
    what, text = f"compare the host leaves of step {step}", json.dumps(leaves)
    if len({*exchange(what, hashlib.sha256(text.encode()).hexdigest())}) == 1:
        return
    # Exchange all leaves only if they differ: there may be thousands.
    by_process = [{tuple(key): rest for key, *rest in json.loads(other)} for other in exchange(what, text)]
    names = dict.fromkeys(key for each in by_process for key in each)
    wrong = ["/".join(key) for key in names if any(each.get(key) != by_process[0].get(key) for each in by_process)]
    raise CheckpointError(
        f"{len(wrong)} leaves of the state are in the memory of single processes and differ between processes:\n"
        f"{listing(wrong)}\nGather them in every process before the save, or make them arrays on a mesh."
    )


@paused()
def take_snapshot(leaves: Sequence[tuple[LeafSpec, Any]], *, copy: bool) -> Snapshot:
    """Return a snapshot of the leaves of `savable_leaves`; with `copy`, the leaves may be donated afterwards.

    The copy is dispatched, and nothing waits for the devices. A donated buffer is safe: the runtime keeps it until all
    copies and programs that were dispatched earlier have read it. Packs are always copies.
    """
    specs = tuple(spec for spec, _ in leaves)
    stored = {spec.key: _storable(leaf) for spec, leaf in leaves if spec.stored}
    members, groups = _arrangement(stored)
    places = {key: (name, index) for name, keys in members.items() for index, key in enumerate(keys)}
    packs = {name: stack_leaves([stored[key] for key in keys]) for name, keys in members.items()}
    arrays = {key: leaf for key, leaf in stored.items() if key not in places}
    if copy:
        arrays = copy_arrays(arrays)
    on_mesh = {
        spec.key: leaf.sharding for spec, leaf in leaves if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }
    layouts = {key: str(tuple(sharding.spec)) for key, sharding in on_mesh.items()}
    meshes = {tuple(sharding.mesh.shape.items()): None for sharding in on_mesh.values()}
    return Snapshot(specs, arrays, groups, packs, places, layouts, tuple(map(dict, meshes)))


def _arrangement(stored: dict[Key, Any]) -> tuple[dict[str, list[Key]], dict[str, list[Key]]]:
    """Return the leaves of each pack, and those of each group: first single ones, then packed ones, pack by pack."""
    members = assign_packs(stored)
    packed = [key for keys in members.values() for key in keys]
    in_packs = {*packed}
    single = [key for key in stored if key not in in_packs]
    groups = {}
    for number, keys in enumerate(group_by_mesh({key: stored[key] for key in (*single, *packed)})):
        groups[str(number) if isinstance(stored[keys[0]], jax.Array) else HOST] = keys
    return members, groups


@paused()
def compilation(leaves: Sequence[tuple[LeafSpec, Any]]) -> Callable[[], None]:
    """Return an action that compiles the programs of `take_snapshot` and `digest_rows` for leaves of these types.

    The action can run in another thread. It holds no arrays, so the leaves may be donated before it runs.
    """
    stored = {spec.key: _storable(leaf) for spec, leaf in leaves if spec.stored}
    members, groups = _arrangement(stored)
    types = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for key, leaf in stored.items()
        if isinstance(leaf, jax.Array)
    }
    del stored

    def compile_programs() -> None:
        packs = {keys[0]: compile_stack([types[key] for key in keys]) for keys in members.values() if keys[0] in types}
        packed = {key for keys in members.values() for key in keys}
        for group, keys in groups.items():
            if group != HOST:
                single = [types[key] for key in keys if key not in packed]
                array_digest.compile_digests(single, [packs[key] for key in keys if key in packs])

    return compile_programs


def group_by_mesh(arrays: dict[Key, Any]) -> list[list[Key]]:
    """Group the paths of arrays by `digest_group`. NumPy arrays are one group."""
    groups: dict[Hashable, list[Key]] = {}
    for key, array in arrays.items():
        group = array_digest.digest_group(array.sharding) if isinstance(array, jax.Array) else HOST
        groups.setdefault(group, []).append(key)
    return list(groups.values())


def host_digest_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the digests of NumPy arrays as one row of `array_digest.digests`."""
    parts = np.array([array_digest.host_digest(array) for array in arrays], np.uint32)
    return np.append(parts, np.uint32(array_digest.host_digest(parts)))[None]


def _storable(leaf: Any) -> Any:
    """Return a leaf as an array that Orbax can write, in native byte order.

    RNG keys become their bits, str their bytes. Arrays that only this process has become NumPy arrays.
    """
    if is_typed_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf) if jax.process_count() > 1 and leaf.is_fully_addressable else leaf
    array = text_bytes(leaf) if is_text(leaf) else np.asarray(leaf)
    return array if array.dtype.isnative else array.byteswap().view(array.dtype.newbyteorder())


def copy_arrays(arrays: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return copies on the same devices, without waiting for them."""
    copies = {key: np.array(array) for key, array in arrays.items() if not isinstance(array, jax.Array)}
    on_devices = {key: array for key, array in arrays.items() if isinstance(array, jax.Array)}
    # `device_put` copies without a program, which would be compiled for each set of leaves.
    leaves, shardings = list(on_devices.values()), [array.sharding for array in on_devices.values()]
    copies |= zip(on_devices, jax.device_put(leaves, shardings, may_alias=False), strict=True)
    return {key: copies[key] for key in arrays}
