"""Allocates host memory for tensors that are read from files.

Large NumPy arrays ask for huge pages. A system that has run for a while moves other pages to make room for them, which
can take longer than reading: an import of 1.07 GB took 2.8 seconds of processor time with them and 1.4 without
(a virtual machine with Linux 6.18, 2026-11; `benchmarks/pretrained.py`). So memory is mapped in ordinary pages here.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.models.pretrained.constants import ALIGNMENT, MAPPED_BYTES


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Make an array whose values are not set, and that JAX can take without a copy where devices use host memory."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes >= MAPPED_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8, nbytes).view(dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class Reused:
    """Memory for one array at a time. It grows to the largest one."""

    def __init__(self):
        self._memory = np.empty(0, np.uint8)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Make an array whose values are not set. It takes the memory of the one before."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # freed before there is more
            self._memory = aligned_empty((nbytes,), np.uint8)
        return self._memory[:nbytes].view(dtype).reshape(shape)
