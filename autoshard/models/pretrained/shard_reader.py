"""Reads shards of parameters. Several threads read pieces of tensors, and copy them to their places.

    shard   the range of a parameter that a device holds
    piece   a part of a shard, from one tensor and of at most `PIECE_BYTES`

While one thread waits for the disk, another copies. A piece stays in the processor's cache between reading and
transposing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard._shown import shown
from autoshard.ckpt.exchange.export import cast_values
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.constants import MOST_THREADS, PIECE_BYTES
from autoshard.models.pretrained.fast_copy import copy_transposed
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.host_memory import Reused, aligned_empty
from autoshard.models.pretrained.tables import Source

Ranges = tuple[tuple[int, int], ...]


@shown
@dataclass(frozen=True)
class Shard:
    """A range of a parameter.

    Attributes:
        source: the tensors of the parameter.
        ranges: the first index and the end in each dimension.
        dtype: the dtype of the values.
    """

    source: Source
    ranges: Ranges
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of indices in each dimension."""
        return tuple(stop - start for start, stop in self.ranges)


@shown
@dataclass(frozen=True)
class Piece:
    """A part of a shard that is read from one tensor.

    Attributes:
        shard: the shard.
        tensor: the tensor.
        outer: indices of the piece in the leading dimensions of the shard, those of layers and experts.
        inner: the range in the other dimensions of the parameter.
    """

    shard: Shard
    tensor: Tensor
    outer: tuple[int, ...]
    inner: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter's other dimensions."""
        return self.shard.source.shape[self.shard.source.leading :]

    @property
    def part(self) -> tuple[slice, ...]:
        """The range of the tensor."""
        return self.shard.source.layout.tensor_index(self.inner, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece in the shard."""
        sizes = [one.stop - one.start for one in self.inner]
        return int(np.prod(sizes, dtype=np.int64)) * np.dtype(self.shard.dtype).itemsize

    def read_into(self, values: np.ndarray, memory: Reused) -> None:
        """Read the piece into the array of its shard.

        Args:
            values: the array.
            memory: memory for values that are in another order or dtype in the tensor than in the shard.

        Raises:
            CheckpointError: a value is too large for the dtype of the shard.
        """
        layout = self.shard.source.layout
        starts = [start for start, _ in self.shard.ranges[self.shard.source.leading :]]
        within = [slice(i.start - n, i.stop - n) for i, n in zip(self.inner, starts, strict=True)]
        target = values[(*self.outer, *within, ...)]  # the ellipsis makes it a view, also for a single value

        def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
            same = layout.in_order and target.dtype == dtype and target.flags.c_contiguous
            return target.reshape(shape) if same and np.prod(shape) == target.size else memory.empty(shape, dtype)

        stored = self.tensor.read_part(self.part, empty)
        if jnp.finfo(target.dtype).maxexp < jnp.finfo(stored.dtype).maxexp:  # float16 does not hold all of bfloat16
            stored = cast_values(self.tensor.name, stored, str(target.dtype))
        if not np.may_share_memory(stored, target):
            copy_transposed(target, layout.parameter(stored, self.inner, self.shape))


def pieces_of(shard: Shard, tensors: Mapping[str, Tensor]) -> Generator[Piece, None, None]:
    """Divide a shard into its pieces, in the order of the values of each tensor."""
    source = shard.source
    ranges, shape = shard.ranges, source.shape[source.leading :]
    most = max(PIECE_BYTES // np.dtype(shard.dtype).itemsize, 1)
    starts, inner = [start for start, _ in ranges[: source.leading]], tuple(slice(*r) for r in ranges[source.leading :])
    for outer in np.ndindex(*(stop - start for start, stop in ranges[: source.leading])):
        tensor = tensors[source.names[tuple(n + start for n, start in zip(outer, starts, strict=True))]]
        for piece in source.layout.pieces(inner, shape, most):
            yield Piece(shard, tensor, outer, piece)


class ShardReader:
    """Reads shards one after another, with several threads. It is a context manager, which ends the threads.

    Args:
        folder: the folder, for messages.
        tensors: the folder's tensors by name.
    """

    def __init__(self, folder: Folder, tensors: Mapping[str, Tensor]):
        self._folder, self._tensors = folder, tensors
        self._lock, self._own = threading.Lock(), threading.local()
        self._number = min(MOST_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._number, thread_name_prefix="autoshard-read")

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown()

    def read(self, shard: Shard) -> np.ndarray:
        """Return the values of a shard.

        Raises:
            AutoshardError: a file cannot be read, or a value is too large for the dtype.
        """
        values, pieces = aligned_empty(shard.shape, shard.dtype), pieces_of(shard, self._tensors)
        if values.nbytes <= PIECE_BYTES:
            self._copy(pieces, values)
            return values
        running = [self._threads.submit(self._copy, pieces, values) for _ in range(self._number)]
        try:
            for one in running:
                one.result()
        finally:
            self._end(pieces)  # after an interrupt
        return values

    def _copy(self, pieces: Generator[Piece, None, None], values: np.ndarray) -> None:
        """Read pieces until none is left, or until a piece cannot be read, here or in another thread."""
        if not hasattr(self._own, "memory"):
            self._own.memory = Reused()
        try:
            while (piece := self._next(pieces)) is not None:
                with self._folder.reading(piece.tensor.name):
                    piece.read_into(values, self._own.memory)
        finally:
            self._end(pieces)

    def _end(self, pieces: Generator[Piece, None, None]) -> None:
        with self._lock:
            pieces.close()

    def _next(self, pieces: Generator[Piece, None, None]) -> Piece | None:
        with self._lock:
            return next(pieces, None)
