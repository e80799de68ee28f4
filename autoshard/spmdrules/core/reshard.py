"""One step of a reshard that the rules require, as `propagate` lists it."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard._shown import shown
from autoshard.spmdrules.core.placement import ReshardKind


@shown
@dataclass(frozen=True)
class Reshard:
    """One collective (or free slice) that the rules require.

    Attributes:
        operator: the operator that requires it, `output` for the function's results.
        operand: the operator's operand number; for a result of a loop or branch `-1 - number`; for `output` the leaf.
        from_spec: the spec before; axes that the array is partial over are not in it.
        to_spec: the spec after.
        kind: the kind of collective; `slice` is free.
        axis: the mesh axis that it runs over.
        bytes_moved: bytes that each device sends each time it runs.
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
