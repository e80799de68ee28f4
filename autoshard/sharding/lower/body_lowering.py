"""The interface of `lowering.Lowering` that other modules of this folder use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.loop_gathers import Gather
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.link_prices import LinkPrices
from autoshard.spmdrules.core.placement import Spec
from autoshard.spmdrules.ir.program import Block, Op


class BodyLowering(Protocol):
    """Lowers operators and blocks; see `lowering.Lowering`."""

    layout: Layout
    mesh: Any
    tpu: Chip | None
    link_prices: LinkPrices
    early: frozenset[tuple[int, int]]
    held: dict[Gather, Any]
    kept: dict[int, Any]

    def constrain(self, x: Any, spec: Spec) -> Any:
        """Return `x` constrained to `spec`."""
        ...

    def computed(self, ops: Sequence[Op], values: dict[int, Any]) -> dict[int, Any]:
        """Return values by their numbers, with the results of these operators."""
        ...

    def gathered(self, x: Any, gather: Gather) -> Any:
        """Return a stored parameter, gathered, in the type in which collectives move it."""
        ...

    def holding(self, held: Mapping[Gather, Any]) -> AbstractContextManager[None]:
        """Use these gathered parameters in the code that is lowered in this context, and no others."""
        ...

    def function(self, block: Block) -> Callable[..., list[Any]]:
        """Return a block as a function of its inputs."""
        ...
