"""The on-chip memory of a TPU that is not reserved for operators."""

from dataclasses import replace

import pytest

from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.on_chip_memory import VMEM_OPTION, array_bytes, scoped_bytes

MiB = 2**20


@pytest.mark.parametrize(
    ("chip", "limit_kib", "left_mib"),
    [("v5e", "16384", 112), ("v5e", "98304", 32), ("v5e", "200000", 0), ("v5p", "131072", 0), ("v5e", "much", 112)],
)
def test_arrays_have_the_memory_that_is_not_reserved(chip, limit_kib, left_mib):
    asked = replace(CHIPS[chip], options={VMEM_OPTION: limit_kib})
    assert array_bytes(asked) == left_mib * MiB
    assert scoped_bytes(asked) <= asked.vector_memory_bytes


def test_the_figures_of_a_target_file_limit_the_memory_for_arrays():
    """The file may give a smaller memory for arrays, none, or no size of the vector memory."""
    v5e = CHIPS["v5e"]
    assert array_bytes(replace(v5e, on_chip_bytes=8e6)) == 8e6
    assert array_bytes(replace(v5e, on_chip_bytes=0.0)) == 0.0
    assert array_bytes(replace(v5e, vector_memory_bytes=0)) == v5e.on_chip_bytes
    assert array_bytes(replace(CHIPS["h100"], vector_memory_bytes=50 * MiB)) == 0.0
