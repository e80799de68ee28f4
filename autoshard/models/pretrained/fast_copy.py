"""Copies between arrays whose dimensions are ordered differently in memory, in blocks that stay in the cache."""

from __future__ import annotations

import itertools

import numpy as np

from autoshard.models.pretrained.constants import BLOCK


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
