"""The on-chip memory of a TPU: the parts for operators and for whole arrays.

XLA:TPU reserves a part of each core's vector memory for the operators that run (`VMEM_OPTION`). It keeps arrays in the
rest. On v4, arrays have a memory of their own. In programs compiled with libtpu 0.0.42.1, arrays have these offsets:

    chip    vector memory of a core   reserved   offsets of arrays
    v5e     128 MiB                   16 MiB     0 to 112 MiB
    v6e     128 MiB                   96 MiB     0 to 30 MiB
    v5p     64 MiB                    32 MiB     32 to 60 MiB
    tpu7x   64 MiB                    48 MiB     8 to 64 MiB; some operators reserve less
"""

from __future__ import annotations

from autoshard.kernels.constants import SCOPED_VMEM_BYTES
from autoshard.sharding.machines.chips import Chip

VMEM_OPTION = "xla_tpu_scoped_vmem_limit_kib"
_MOST_CORES = 2  # of one device; each core has a vector memory


def scoped_bytes(chip: Chip) -> float:
    """Return the bytes of one core's vector memory that are reserved for operators, at most all of it."""
    limit = str(chip.options.get(VMEM_OPTION, ""))
    size = float(limit) * 1024 if limit.isdecimal() else float(SCOPED_VMEM_BYTES)
    return min(size, chip.vector_memory_bytes or size)


def array_bytes(chip: Chip) -> float:
    """Return the bytes of on-chip memory in which whole arrays can be kept; 0 if there is none.

    It is at most `Chip.on_chip_bytes`. If the size of the vector memory is unknown, it is all of that.

    >>> from autoshard.sharding.machines.chips import CHIPS
    >>> {name: array_bytes(CHIPS[name]) / 2**20 for name in ("v4", "v5e", "v5p", "v6e", "tpu7x", "h100")}
    {'v4': 128.0, 'v5e': 112.0, 'v5p': 32.0, 'v6e': 32.0, 'tpu7x': 16.0, 'h100': 0.0}
    """
    has_own_memory = chip.on_chip_bytes > _MOST_CORES * chip.vector_memory_bytes  # as v4 has
    if has_own_memory or not chip.vector_memory_bytes:
        return chip.on_chip_bytes
    return max(min(chip.on_chip_bytes, chip.vector_memory_bytes - scoped_bytes(chip)), 0.0)
