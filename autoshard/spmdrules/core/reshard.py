"""One step of what the rules ask for, as `propagate` lists it."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard._shown import shown
from autoshard.spmdrules.core.placement import ReshardKind


@shown
@dataclass(frozen=True)
class Reshard:
    """One collective (or free slice) that the rules ask for.

    Attributes:
        operator: the operator that asks, `output` for the function's results.
        operand: which of its operands; of a loop's or branch's own results `-1 - number`; of `output` the leaf.
        from_spec: where the array is; what it is partial over is not said here.
        to_spec: where it goes.
        kind: what kind of collective; `slice` is free.
        axis: the mesh axis that it runs over.
        bytes_moved: bytes that each device sends, each time.
        times: how often it runs.
        source: the user's line.
    """

    operator: str
    operand: int
    from_spec: PartitionSpec
    to_spec: PartitionSpec
    kind: ReshardKind
    axis: str
    bytes_moved: float
    times: float
    source: str

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        often = f" x {self.times:g}" if self.times != 1 else ""
        return (
            f"{self.operator} operand {self.operand}: {self.from_spec} -> {self.to_spec}, {self.kind} over "
            f"'{self.axis}', {self.bytes_moved:.0f} bytes{often}{where}"
        )
