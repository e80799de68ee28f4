"""Writing and reading one step with Orbax. No other module calls Orbax."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from autoshard import _compat
from autoshard.ckpt.state.named_leaves import PACKS, Key, LeafSpec, bits_of, nest, unnest
from autoshard.ckpt.state.snapshot import Snapshot
from autoshard.ckpt.store import abandoned_reads
from autoshard.ckpt.store.constants import CONCURRENT_BYTES, COPIES_WHILE_READING, MAX_HANDOVER_S
from autoshard.ckpt.store.manifest import Manifest
from autoshard.ckpt.store.step_lock import ReadLock

_STATE, _DIGESTS = "state", "digests"
# Orbax numbers all operations of a process with one counter. A load that starts during a save breaks the save.
_ORBAX_LOCK = threading.Lock()


class Pending(Protocol):
    """A write in the background."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the write is done and raise its error, if any."""
        ...


class Writer:
    """Writes steps in the background, one at a time."""

    def __init__(self) -> None:
        # The interpreter joins this thread when it exits, so a started save is completed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autoshard-ckpt")
        self._preparing: Future[None] | None = None

    def prepare(self, action: Callable[[], None]) -> None:
        """Start an action in the background. Steps are written after it."""

        def act() -> None:
            with _compat.no_mesh():  # as in `_write`
                action()

        self._preparing = self._thread.submit(act)

    def write(
        self, path: Any, snapshot: Snapshot, manifest: Callable[[], Manifest], check: Callable[[], None]
    ) -> Pending:
        """Start to write a step. It appears under its name only when it is complete.

        Args:
            path: the path of the step.
            snapshot: the state to write.
            manifest: makes the manifest; called in the background if there is one process.
            check: raises an error if the disk cannot be written. If there is one process, it is called in the
                background before anything is written; else the caller has checked.
        """
        logging.getLogger("absl").addFilter(_keep_record)  # adding a filter again has no effect
        if jax.process_count() == 1:
            dispatching = threading.Event()
            write = self._thread.submit(_write, path, snapshot, manifest, check, dispatching)
            # The digests of the state have to be dispatched before the next train step. On virtual devices, a program
            # that is dispatched beside a step waits for the end of that step, and writing waits for the digests.
            if self._preparing is None or self._preparing.done():
                dispatching.wait(MAX_HANDOVER_S)
            return write
        # Orbax starts a save with collectives. In another thread they could interleave with those of the train step.
        contents = _contents(snapshot, snapshot.digest_rows())
        with _saving_context(jax.tree.leaves(contents)):
            return ocp.save_checkpointables_async(path, contents, custom_metadata=manifest().to_json())


def _write(
    path: Any,
    snapshot: Snapshot,
    manifest: Callable[[], Manifest],
    check: Callable[[], None],
    dispatching: threading.Event,
) -> None:
    try:
        with _compat.no_mesh():  # as in the thread of the caller: JAX compiles a program for the current mesh
            rows = snapshot.digest_rows(dispatching.set)
    finally:
        dispatching.set()
    check()
    metadata = manifest().to_json()
    contents = _contents(snapshot, rows)
    with _ORBAX_LOCK, _saving_context(jax.tree.leaves(contents)):
        ocp.save_checkpointables(path, contents, custom_metadata=metadata)


def _contents(snapshot: Snapshot, rows: dict[str, Any]) -> dict[str, Any]:
    arrays = snapshot.arrays | {(PACKS, name): pack for name, pack in snapshot.packs.items()}
    # The state first: Orbax writes in this order, and waits for the digests.
    contents: dict[str, Any] = {_STATE: nest(arrays)} if arrays else {}
    # Orbax does not write an empty tree, so a state of empty arrays needs a placeholder.
    contents[_DIGESTS] = rows or {"none": np.zeros((1, 1), np.uint32)}
    return contents


def _saving_context(arrays: Iterable[Any]) -> ocp.Context:
    """Return the settings to write arrays: each replica writes a part, without compression, which saves little.

    Limits the bytes in flight: else Orbax encodes the whole step before it writes the first byte.
    """
    arrays = list(arrays)
    context = ocp.Context()
    context.memory_options.write_concurrent_bytes = _concurrent_bytes(arrays)
    context.memory_options.deepcopy_host_arrays = False  # the arrays are copies, or the caller waits
    context.array_options.saving.use_compression = False
    context.array_options.saving.use_replica_parallel = not any(map(_changed_by_slicing, arrays))
    return context


def _changed_by_slicing(array: Any) -> bool:
    """Return whether slicing an array can change its bits.

    XLA:CPU converts some narrow floats to wider ones to slice them, which changes the bits of NaNs. Which types it
    converts depends on its version and flags.
    """
    on_cpu = isinstance(array, jax.Array) and next(iter(array.sharding.device_set)).platform == "cpu"
    return on_cpu and jnp.issubdtype(array.dtype, jnp.floating) and bits_of(array.dtype) < 32


def _concurrent_bytes(arrays: Iterable[Any], copies: int = 1) -> int:
    """Return how many bytes of arrays Orbax may have in flight. It does not accept an array of more."""
    sizes = [math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays]
    return max((CONCURRENT_BYTES // copies, *sizes)) + 1


def read_manifest(path: Any) -> Manifest:
    """Return the manifest of a step. Raises any error of Orbax or `Manifest.from_json`."""
    # The log is about the metadata of the arrays, which Orbax reads too and which are not needed.
    with _ORBAX_LOCK, abandoned_reads.silenced(), _deferred_log(drop=True):
        return Manifest.from_json(ocp.checkpointables_metadata(path).custom_metadata)


def read_digest_rows(path: Any, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the saved digests, per group uint32 [devices, leaves + 1]."""
    groups = {group: np.ndarray for group, _ in manifest.digests.values()}
    return _load(path, {_DIGESTS: groups})[_DIGESTS] if groups else {}


def read_arrays(path: Any, wanted: Mapping[Key, Any], *, partial: bool = False) -> dict[Key, Any]:
    """Return arrays of a step.

    Args:
        path: the path of the step.
        wanted: for each array `np.ndarray`, or a `ShapeDtypeStruct` with its sharding.
        partial: whether the step may have other arrays as well.
    """
    if not wanted:
        return {}
    return unnest(_load(path, {_STATE: nest(wanted)}, partial=partial)[_STATE], list(wanted))


class LeafReader:
    """Reads the leaves of a step one at a time into host memory. Keeps the last pack that was read.

    The step is not removed as long as this object exists.
    """

    def __init__(self, path: Any, manifest: Manifest) -> None:
        """Lock the step.

        Raises:
            FileNotFoundError: the step was removed.
        """
        self._lock = ReadLock(path)
        self._path, self._places = path, manifest.places
        self._last: tuple[Key, np.ndarray | Exception] | None = None

    def read(self, key: Key) -> np.ndarray:
        """Return a leaf; for RNG keys their bits. Raises any error of Orbax."""
        _trim_heap()
        if key not in self._places:
            return _read_one(self._path, key)
        name, index = self._places[key]
        pack = (PACKS, name)
        if self._last is None or self._last[0] != pack:
            self._last = None  # keep one pack in memory
            try:
                self._last = pack, _read_one(self._path, pack)
            except Exception as error:  # raised below, for each leaf of the pack
                self._last = pack, error
        values = self._last[1]
        if isinstance(values, Exception):
            raise values
        return np.asarray(values[index])

    def in_order(self, specs: Iterable[LeafSpec]) -> list[LeafSpec]:
        """Return leaves in the order that reads each pack once."""
        return sorted(specs, key=lambda spec: self._places.get(spec.key, ("", 0)))


def _trim_heap() -> None:
    """Return free memory of the C library to the system: each thread of TensorStore keeps an arena of a leaf's size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # only glibc has it
        trim(0)


def _read_one(path: Any, key: Key) -> np.ndarray:
    """Return one array in host memory."""
    return unnest(_load(path, {_STATE: nest({key: np.ndarray})}, partial=True)[_STATE], [key])[key]


def file_bytes(path: Any) -> int:
    """Return the total size of all files of a step."""
    count = 0
    for entry in path.iterdir():
        count += file_bytes(entry) if entry.is_dir() else entry.stat().length
    return count


def copy_tree(source: Any, target: Any) -> None:
    """Copy a folder recursively."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            copy_tree(entry, target / entry.name)
        else:
            entry.copy(target / entry.name)


def root_cause(error: BaseException, path: Any) -> tuple[str | None, str]:
    """Return the file below `path` that an error or one of its causes names, or None, and the error's text.

    TensorStore's error names the file. Orbax wraps it into an error that does not.
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
    structs = [one for one in jax.tree.leaves(wanted) if isinstance(one, jax.ShapeDtypeStruct)]
    context.memory_options.read_concurrent_bytes = _concurrent_bytes(structs, COPIES_WHILE_READING)
    if jax.process_count() > 1:
        # Each process reads by itself. In a joint read that fails in one process, Orbax lets the others wait.
        process = jax.process_index()
        context.multiprocessing_options.primary_host = process
        context.multiprocessing_options.active_processes = {process}
        context.multiprocessing_options.barrier_sync_key_prefix = f"autoshard_process_{process}"
    with _ORBAX_LOCK, abandoned_reads.silenced(), context, _deferred_log():
        return ocp.load_checkpointables(path, wanted)


@contextlib.contextmanager
def _deferred_log(*, drop: bool = False) -> Iterator[None]:
    """Delay Orbax's log records until reading succeeds. Drop them if it fails: the error says the same in one line.

    With `drop` they are dropped in any case.
    """
    delayed: list[logging.LogRecord] = []

    def delay(record: logging.LogRecord) -> bool:
        delayed.append(record)
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(delay)
    try:
        yield
    finally:
        logger.removeFilter(delay)
    for record in [] if drop else delayed:  # not reached if reading fails
        logger.handle(record)


def _keep_record(record: logging.LogRecord) -> bool:
    """Drop the tracebacks of Orbax's failed threads: `result` raises their errors."""
    return "_SignalingThread.run() raised" not in record.getMessage()
