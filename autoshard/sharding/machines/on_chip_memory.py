"""The on-chip memory of a TPU: what kernels may use of it, and where the compiler keeps whole arrays.

XLA:TPU sets a part of each core's vector memory aside for the operators that run (`VMEM_OPTION`), and keeps arrays in
the rest. On v4, arrays are kept in a memory of their own. Compiled (libtpu 0.0.42.1), arrays are at 0 to 112 MiB on
v5e, where 16 of 128 MiB are set aside, at 0 to 30 on v6e (96 of 128), and at 32 to 60 on v5p (32 of 64, of each core).
On tpu7x (48 of 64), arrays are at 8 to 64: operators that need less leave more.
"""

from __future__ import annotations

from autoshard.kernels.constants import SCOPED_VMEM_BYTES
from autoshard.sharding.machines.chips import Chip

VMEM_OPTION = "xla_tpu_scoped_vmem_limit_kib"
_MOST_CORES = 2  # of one device; each has a vector memory


def scoped_bytes(chip: Chip) -> float:
    """Return the bytes of one core's vector memory that are set aside for operators, under the chip's options.

    Operators cannot use more than there is.
    """
    limit = str(chip.options.get(VMEM_OPTION, ""))
    size = float(limit) * 1024 if limit.isdecimal() else float(SCOPED_VMEM_BYTES)
    return min(size, chip.vector_memory_bytes or chip.on_chip_bytes or float(SCOPED_VMEM_BYTES))


def array_bytes(chip: Chip) -> float:
    """Return the bytes of on-chip memory in which whole arrays can be kept; 0 if there is none.

    That is at most `Chip.on_chip_bytes`, and all of it if the size of the vector memory is unknown.

    >>> from autoshard.sharding.machines.chips import CHIPS
    >>> {name: array_bytes(CHIPS[name]) / 2**20 for name in ("v4", "v5e", "v5p", "v6e", "tpu7x", "h100")}
    {'v4': 128.0, 'v5e': 112.0, 'v5p': 32.0, 'v6e': 32.0, 'tpu7x': 16.0, 'h100': 0.0}
    """
    has_own_memory = chip.on_chip_bytes > _MOST_CORES * chip.vector_memory_bytes  # as v4 has
    if has_own_memory or not chip.vector_memory_bytes:
        return chip.on_chip_bytes
    return max(min(chip.on_chip_bytes, chip.vector_memory_bytes - scoped_bytes(chip)), 0.0)
