"""The only place that calls Orbax: one step out, one step in."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt.state.named_leaves import PACKS, Key, LeafSpec, bits_of, nest, unnest
from autoshard.ckpt.state.snapshot import Snapshot
from autoshard.ckpt.store.manifest import Manifest

_STATE, _DIGESTS = "state", "digests"
IN_FLIGHT_BYTES = 128 * 2**20  # enough to keep a disk busy, little beside a state
_READ_COPIES = 4  # of what is read: as it is stored, decoded, on its way to a device, and what the allocator keeps
# Orbax numbers a process's operations by one counter: a load that begins while a save does breaks that save.
_ALONE = threading.Lock()


class Pending(Protocol):
    """A write in the background."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for it and raises what went wrong."""
        ...


class Writer:
    """Writes steps in the background, one at a time."""

    def __init__(self) -> None:
        # Its thread is joined when the interpreter ends, so a save that was begun is finished.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autoshard-ckpt")

    def write(self, path: Any, snapshot: Snapshot, manifest: Callable[[], Manifest]) -> Pending:
        """Starts to write a step; it appears under its name only when it is whole.

        Args:
            path: of the step.
            snapshot: what is written.
            manifest: makes what the step says of itself, in the background where there is one.
        """
        logging.getLogger("absl").addFilter(_not_of_threads)  # there once, however often it is added
        if jax.process_count() == 1:
            return self._thread.submit(_write, path, snapshot, manifest)
        # Orbax starts a save with collectives, which must not meet the train step's from another thread.
        contents = _contents(snapshot)
        with _saving(jax.tree.leaves(contents)):
            return ocp.save_checkpointables_async(path, contents, custom_metadata=manifest().to_json())


def _write(path: Any, snapshot: Snapshot, manifest: Callable[[], Manifest]) -> None:
    metadata = manifest().to_json()
    contents = _contents(snapshot)
    with _ALONE, _saving(jax.tree.leaves(contents)):
        ocp.save_checkpointables(path, contents, custom_metadata=metadata)


def _contents(snapshot: Snapshot) -> dict[str, Any]:
    # Orbax refuses an empty tree, which a state of empty arrays would be.
    contents: dict[str, Any] = {_DIGESTS: snapshot.digest_rows() or {"none": np.zeros((1, 1), np.uint32)}}
    arrays = snapshot.arrays | {(PACKS, name): pack for name, pack in snapshot.packs.items()}
    if arrays:
        contents[_STATE] = nest(arrays)
    return contents


def _saving(arrays: Iterable[Any]) -> ocp.Context:
    """How arrays are written: each replica its share, and as they are: values of training hardly compress.

    Some at a time: without a limit Orbax encodes all of a step before it writes the first byte.
    """
    arrays = list(arrays)
    context = ocp.Context()
    context.memory_options.write_concurrent_bytes = _in_flight(arrays)
    context.memory_options.deepcopy_host_arrays = False  # they are copies, or the caller waits
    context.array_options.saving.use_compression = False
    context.array_options.saving.use_replica_parallel = not any(map(_changed_by_slicing, arrays))
    return context


def _changed_by_slicing(array: Any) -> bool:
    """Whether a replica's share of an array could have other bits than the array.

    XLA:CPU slices some narrow floats by way of wider ones, which changes the bits of their NaNs: which, is told apart
    by its version and its flags.
    """
    on_cpu = isinstance(array, jax.Array) and next(iter(array.sharding.device_set)).platform == "cpu"
    return on_cpu and jnp.issubdtype(array.dtype, jnp.floating) and bits_of(array.dtype) < 32


def _in_flight(arrays: Iterable[Any], copies: int = 1) -> int:
    """Bytes of arrays that Orbax may have in flight at once; it refuses an array of more."""
    sizes = [math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays]
    return max((IN_FLIGHT_BYTES // copies, *sizes)) + 1


def read_manifest(path: Any) -> Manifest:
    """What a step says of itself. Raises whatever Orbax or `Manifest.from_json` raise."""
    with _ALONE, _told_once(never=True):  # it looks at the arrays as well, of which nothing is wanted here
        return Manifest.from_json(ocp.checkpointables_metadata(path).custom_metadata)


def read_digest_rows(path: Any, manifest: Manifest) -> dict[str, np.ndarray]:
    """The saved digests, per group uint32 [devices, leaves + 1]."""
    groups = {group: np.ndarray for group, _ in manifest.digests.values()}
    return _load(path, {_DIGESTS: groups})[_DIGESTS] if groups else {}


def read_arrays(path: Any, wanted: Mapping[Key, Any], *, partial: bool = False) -> dict[Key, Any]:
    """Arrays of a step, all that it has or with `partial` some, as `ShapeDtypeStruct`s or as `np.ndarray`."""
    if not wanted:
        return {}
    return unnest(_load(path, {_STATE: nest(wanted)}, partial=partial)[_STATE], list(wanted))


class Leaves:
    """Leaves of a step one at a time, in host memory; of packed ones best those of one pack after each other."""

    def __init__(self, path: Any, manifest: Manifest) -> None:
        self._path, self._places = path, manifest.places
        self._last: tuple[Key, np.ndarray | Exception] | None = None

    def read(self, key: Key) -> np.ndarray:
        """A leaf, RNG keys as their bits. Raises whatever Orbax raises."""
        _trim()
        if key not in self._places:
            return _read_one(self._path, key)
        name, index = self._places[key]
        pack = (PACKS, name)
        if self._last is None or self._last[0] != pack:
            self._last = None  # only one in memory
            try:
                self._last = pack, _read_one(self._path, pack)
            except Exception as error:  # any: raised below, for this leaf and the pack's others, which read it once
                self._last = pack, error
        found = self._last[1]
        if isinstance(found, Exception):
            raise found
        return np.asarray(found[index])

    def in_order(self, specs: Iterable[LeafSpec]) -> list[LeafSpec]:
        """Leaves in the order in which they are best read."""
        return sorted(specs, key=lambda spec: self._places.get(spec.key, ("", 0)))


def _trim() -> None:
    """Has the C library give back what it holds free: TensorStore's threads each keep an arena as large as a leaf."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc's alone
        trim(0)


def _read_one(path: Any, key: Key) -> np.ndarray:
    """One array alone, into host memory."""
    return unnest(_load(path, {_STATE: nest({key: np.ndarray})}, partial=True)[_STATE], [key])[key]


def file_bytes(path: Any) -> int:
    """Bytes of all files of a step."""
    count = 0
    for entry in path.iterdir():
        count += file_bytes(entry) if entry.is_dir() else entry.stat().length
    return count


def copy_tree(source: Any, target: Any) -> None:
    """A folder with all that is in it."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            copy_tree(entry, target / entry.name)
        else:
            entry.copy(target / entry.name)


def explained(error: BaseException, path: Any) -> tuple[str | None, str]:
    """The file below `path` that an error or one of its causes names, if one does, and its text.

    Orbax wraps TensorStore's error, which knows the file, into one about handlers, which does not.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in reversed(chain):
        files = re.findall(re.escape(str(path)) + r"/([\w./%-]*\w)", str(link))
        if files:
            return max(files, key=len), " ".join(str(link).split())
    return None, " ".join(str(chain[-1] if str(chain[-1]) else error).split())


def _load(path: Any, wanted: dict[str, Any], *, partial: bool = False) -> dict[str, Any]:
    context = ocp.Context()
    context.pytree_options.loading.partial_load = partial
    asked = [one for one in jax.tree.leaves(wanted) if isinstance(one, jax.ShapeDtypeStruct)]
    context.memory_options.read_concurrent_bytes = _in_flight(asked, _READ_COPIES)
    if jax.process_count() > 1:
        # Each process reads for itself: where one fails, Orbax would let the others wait for it.
        me = jax.process_index()
        context.multiprocessing_options.primary_host = me
        context.multiprocessing_options.active_processes = {me}
        context.multiprocessing_options.barrier_sync_key_prefix = f"autoshard_process_{me}"
    with contextlib.ExitStack() as failed:
        # Orbax drops the other leaves' failed tasks, and asyncio would print a page for each of them.
        failed.callback(logging.getLogger("asyncio").addFilter, _not_orbax)
        with _ALONE, context, _told_once():
            loaded = ocp.load_checkpointables(path, wanted)
        failed.pop_all()
    return loaded


@contextlib.contextmanager
def _told_once(*, never: bool = False) -> Iterator[None]:
    """Holds back what Orbax logs, and drops it where reading fails: the error that is raised says it in one line.

    With `never` it is dropped in any case.
    """
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
    for record in [] if never else held:  # not reached where reading fails
        logger.handle(record)


def _not_of_threads(record: logging.LogRecord) -> bool:
    """Drops the pages that Orbax prints for each of its threads that fail: what they raise, `result` raises again."""
    return "_SignalingThread.run() raised" not in record.getMessage()


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()
