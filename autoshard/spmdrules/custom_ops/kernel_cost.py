"""What an opaque operator costs, as its author declares it: arithmetic, memory traffic and memory held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class KernelCost:
    """The cost of one run of an operator on one device.

    Attributes:
        flops: floating-point operations of its matrix products.
        itemsize: bytes of an element of the products' narrower operand. It decides which peak of a chip applies.
        moved_bytes: bytes that it reads from and writes to device memory.
        held_bytes: peak bytes of its own values in device memory, besides operands and results.
        vector_ops: operations on elements outside of the matrix products, of 32 bits.
        overhead_us: microseconds that pass beside arithmetic and memory traffic, such as steps of a kernel's grid.

    >>> KernelCost(flops=2e9, itemsize=2, moved_bytes=1e6).times(3).flops
    6000000000.0
    """

    flops: float
    itemsize: int
    moved_bytes: float
    held_bytes: float = 0.0
    vector_ops: float = 0.0
    overhead_us: float = 0.0

    def times(self, runs: int) -> KernelCost:
        """Return the cost of several runs at once."""
        return replace(self, **{name: getattr(self, name) * runs for name in _SUMS})

    def plus(self, other: KernelCost) -> KernelCost:
        """Return the cost of this run and then another of the same itemsize."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return replace(self, **sums | {"held_bytes": max(self.held_bytes, other.held_bytes)})


_SUMS = ("flops", "moved_bytes", "held_bytes", "vector_ops", "overhead_us")

Cost = Callable[..., KernelCost]
"""From the operands of one shard, anything with a shape and a dtype, to the cost of one run."""


def declared_cost(eqn: Any, operands: Sequence[Any]) -> KernelCost | None:
    """Return the declared cost of an operator's equation on operands of some shapes and dtypes; None if it has none."""
    cost = eqn.params.get("cost")
    return cost(*operands) if cost is not None else None
