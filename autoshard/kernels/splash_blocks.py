"""Block sizes of splash attention."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.kernels.constants import LANES, LARGEST_BLOCK, LARGEST_BLOCK_32_BITS, LARGEST_COMPUTED


@shown
@dataclass(frozen=True)
class SplashBlocks:
    """Block sizes of the three kernels of splash attention, in positions.

    Attributes:
        forward: queries, keys, and keys computed at a time, in the forward pass.
        dkv: the same for the gradients of keys and values.
        dq: queries and keys for the gradient of queries.
    """

    forward: tuple[int, int, int]
    dkv: tuple[int, int, int]
    dq: tuple[int, int]

    @classmethod
    def for_shape(cls, queries: int, keys: int, itemsize: int) -> SplashBlocks:
        """Return the block sizes for a number of queries and keys, and bytes of an element."""
        largest = LARGEST_BLOCK_32_BITS if itemsize >= 4 else LARGEST_BLOCK
        block = (largest, largest, min(largest, LARGEST_COMPUTED))
        return cls(block, block, (largest, largest)).fit(queries, keys)

    def fit(self, queries: int, keys: int) -> SplashBlocks:
        """Return these block sizes, reduced to divisors of the numbers of queries and keys on a shard."""

        def three(block: tuple[int, int, int]) -> tuple[int, int, int]:
            memory = _divisor(keys, block[1])
            return _divisor(queries, block[0]), memory, _divisor(memory, block[2])

        return SplashBlocks(
            three(self.forward), three(self.dkv), (_divisor(queries, self.dq[0]), _divisor(keys, self.dq[1]))
        )


def _divisor(size: int, largest: int) -> int:
    """Return the largest multiple of 128 that divides `size` and is not above `largest`."""
    for block in range(min(largest, size) // LANES * LANES, 0, -LANES):
        if size % block == 0:
            return block
    raise ValueError(f"splash attention takes sequences of a multiple of {LANES} positions, not of {size}")
