"""Reads tensors quickly: the disk reads ahead while one is transposed, in blocks that stay in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.constants import AHEAD_BYTES, BLOCK


class FetchAhead:
    """Lets the system read the next tensors into its cache while one is copied.

    With several processes it does nothing, because each reads parts of the tensors only.

    Args:
        tensors: the tensors in the order in which they are read.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = tensors if jax.process_count() == 1 else ()
        self._order = {one.name: number for number, one in enumerate(self._tensors)}
        self._fetched = 0

    def reading(self, name: str) -> None:
        """Say that a tensor is read now."""
        ahead = 0
        for number in range(self._order.get(name, len(self._tensors)), len(self._tensors)):
            one = self._tensors[number]
            if number >= self._fetched and one.fetch is not None:
                one.fetch()
                self._fetched = number + 1
            ahead += one.nbytes
            if ahead > AHEAD_BYTES:
                break


def copy_transposed(target: np.ndarray, source: np.ndarray) -> None:
    """Copy values into an array of the same shape, and cast them to its dtype.

    Where the dimension that is contiguous in memory differs, blocks of both dimensions are copied. Otherwise each value
    would be in a cache line of its own.
    """
    if target.dtype == source.dtype:  # plain integers are copied faster than values of other dtypes
        plain = np.dtype(f"u{target.itemsize}")
        target, source = target.view(plain), source.view(plain)
    inner, outer = _contiguous(source), _contiguous(target)
    if inner == outer:
        target[...] = source
        return
    sizes = [BLOCK if axis in (inner, outer) else 1 for axis in range(target.ndim)]
    steps = [[slice(n, n + b) for n in range(0, size, b)] for size, b in zip(target.shape, sizes, strict=True)]
    for block in itertools.product(*steps):
        # A compact copy first: rows that are a power of two of bytes apart would share a few lines of the cache.
        target[block] = source[block].copy(order="K")


def _contiguous(array: np.ndarray) -> int:
    """Return the dimension of more than one element whose elements are nearest in memory; 0 if there is none."""
    strides = [(stride, axis) for axis, stride in enumerate(array.strides) if array.shape[axis] > 1]
    return min(strides)[1] if strides else 0
