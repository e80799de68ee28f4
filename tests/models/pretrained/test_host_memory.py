"""Memory for tensors: alignment, ordinary pages for large arrays, and reuse."""

import re
from pathlib import Path

import numpy as np
import pytest

from autoshard.models.pretrained.constants import ALIGNMENT, MAPPED_BYTES
from autoshard.models.pretrained.host_memory import Reused, aligned_empty


@pytest.mark.parametrize("shape", [(), (5, 7), (3, MAPPED_BYTES // 2 + 1)])
def test_arrays_are_aligned_and_can_be_written(shape):
    found = aligned_empty(shape, "bfloat16")
    found[...] = 1
    assert found.shape == shape and found.dtype == "bfloat16"
    assert found.ctypes.data % ALIGNMENT == 0 and (found == 1).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps, which only Linux has")
def test_large_arrays_have_ordinary_pages():
    """`hg`: the program asks for huge pages. A NumPy array of this size does."""

    def asks_for_huge_pages(array):
        middle = array.ctypes.data + array.nbytes // 2
        for first, last, flags in re.findall(
            r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
        ):
            if int(first, 16) <= middle < int(last, 16):
                return "hg" in flags.split()
        raise AssertionError("no mapping has the array")

    assert not asks_for_huge_pages(aligned_empty((8 * MAPPED_BYTES,), np.uint8))


def test_memory_is_reused_and_grows():
    memory = Reused()
    first, second = memory.empty((6, 4), "float32"), memory.empty((3,), "int8")
    assert np.shares_memory(first, second) and first.shape == (6, 4) and second.dtype == np.int8
    larger = memory.empty((100,), "float64")
    larger[:] = 1.0
    assert larger.ctypes.data % ALIGNMENT == 0 and np.shares_memory(larger, memory.empty((800,), "uint8"))
