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
        efficiency: FLOP/s that its products reach, as a fraction of what large products reach on the chip.

    >>> KernelCost(flops=2e9, itemsize=2, moved_bytes=1e6).times(3).flops
    6000000000.0
    """

    flops: float
    itemsize: int
    moved_bytes: float
    held_bytes: float = 0.0
    vector_ops: float = 0.0
    overhead_us: float = 0.0
    efficiency: float = 1.0

    def times(self, runs: float) -> KernelCost:
        """Return the cost of several runs at once."""
        return replace(self, **{name: getattr(self, name) * runs for name in _SUMS})


_SUMS = ("flops", "moved_bytes", "held_bytes", "vector_ops", "overhead_us")

Cost = Callable[..., KernelCost | tuple[KernelCost, ...]]
"""A function from the operands of one shard, which have a shape and a dtype, to the cost of one run.

A tuple has the costs of several kernels that run one after another.
"""


def declared_costs(eqn: Any, operands: Sequence[Any]) -> tuple[KernelCost, ...]:
    """Return the declared costs of an operator's kernels on operands of some shapes and dtypes; empty if it has none.

    Raises:
        TypeError: the operator's `cost` returns something else.
    """
    cost = eqn.params.get("cost")
    if cost is None:
        return ()
    found = cost(*operands)
    costs = found if isinstance(found, tuple) else (found,)
    if not costs or not all(isinstance(each, KernelCost) for each in costs):
        raise TypeError(
            f"operator '{eqn.primitive.name}': cost returns {found!r:.80}; it must return a KernelCost, or a tuple of "
            "them"
        )
    return costs
