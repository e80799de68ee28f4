"""Reads ranges of a tensor from its bytes in a file.

The library `safetensors` checks a file. Its reader maps the file into memory and copies twice, and has no NumPy arrays
of 8-bit floating-point dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import cast

import numpy as np

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, row-major and little-endian.

    Attributes:
        path: the file.
        offset: the offset of its first byte.
        shape: its shape.
        dtype: the name of its dtype.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self, index: tuple[slice, ...] = (), empty: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
        """Return a range of the values, in new memory.

        Args:
            index: a slice of each dimension; by default all values.
            empty: makes the array for the values from its shape and dtype.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file ends before the tensor does.
        """
        ranges = [one.indices(size)[:2] for one, size in zip(index, self.shape, strict=bool(index))]
        ranges += [(0, size) for size in self.shape[len(ranges) :]]
        sizes, dtype = tuple(max(stop - start, 0) for start, stop in ranges), np.dtype(self.dtype)
        # Dimensions behind `inner` are whole. If those before it have one index, the range is contiguous in the file.
        inner = max((n for n, size in enumerate(sizes) if size != self.shape[n]), default=0)
        strides = [int(np.prod(self.shape[n + 1 :], dtype=np.int64)) for n in range(len(self.shape))]
        if any(size != 1 for size in sizes[:inner]):
            whole = np.memmap(self.path, np.uint8, "r", self.offset, (int(np.prod(self.shape)) * dtype.itemsize,))
            part = whole.view(dtype).reshape(self.shape)[tuple(slice(*one) for one in ranges)]
            found = empty(sizes, dtype)
            found[...] = part
            return found
        found = empty(sizes, dtype)
        first = sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True))
        self._read_into(found.reshape(-1).view(np.uint8), self.offset + first * dtype.itemsize)
        return found

    def _read_into(self, target: np.ndarray, offset: int) -> None:
        with _open_file(self.path) as file:
            file.seek(offset)
            left = target.data
            while left and (count := file.readinto(left)):
                left = left[count:]
        if left:
            raise ValueError(f"{self.path} ends {len(left)} bytes too early")


def _open_file(path: Path) -> FileIO:
    """Open a file for reading, without a buffer."""
    return cast(FileIO, path.open("rb", buffering=0))
