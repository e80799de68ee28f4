"""What the loop over the ticks of a pipeline carries, which parts of a tick use it, and how it moves between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.sharding.pipeline.schedules import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    MIDDLE,
    RECOMPUTE,
    WEIGHTS,
    Schedule,
)
from autoshard.spmdrules.families.stacked.stages import shift_stages

WAITING = {
    "residuals": (FORWARD, (BACKWARD, WEIGHTS)),
    "inputs": (FORWARD, (RECOMPUTE,)),
    "middle_stacks": (FORWARD, (MIDDLE,)),
    "outlet": (FORWARD, (MIDDLE,)),
    "for_weights": (BACKWARD, (WEIGHTS,)),
    "after_stacks": (BACKWARD, (AFTER,)),
}
"""Values that wait in slots: the part that makes them, and the parts that take them."""
USED_BY = {
    **{name: (made, *taken) for name, (made, taken) in WAITING.items()},
    "inlet": (BEFORE, FORWARD), "forward": (FORWARD,), "backward": (BACKWARD, AFTER), "forward_sums": (FORWARD,),
    "middle": (MIDDLE,), "backward_sums": (BACKWARD, WEIGHTS), "after": (AFTER,),
}  # fmt: skip
"""Entry of the state -> the parts that read or write it."""


class StageMoves:
    """Moves the results of stages to the next stages.

    A part first moves the values that it takes. If gradients of weights are computed in a part of their own, values
    move at the end of the tick instead, while the stages compute these gradients, which do not depend on the move.

    Args:
        schedule: the ticks.
        reverse: whether the first stage has the last layers.
    """

    def __init__(self, schedule: Schedule, reverse: bool):
        self.stages, self.ring, self.reverse = schedule.stages, schedule.chunks > 1, reverse
        self.at_end = WEIGHTS in schedule.ticks

    def received(self, values: Sequence[Any], edges: Sequence[Any], row: dict[str, Any], part: str) -> list[Any]:
        """Return the inputs of each stage for a part.

        With several chunks, the stages form a ring. The first stage takes the edges for its first chunk. For a later
        chunk, it takes the result of the last stage for the chunk before.

        Args:
            values: the results of each stage, `[N, ...]`. If values move at the end of a tick, they have moved already.
            edges: what the first stage takes, `[...]`; empty for zeros.
            row: the numbers of the tick.
            part: the part.
        """
        if self.at_end:
            return [self._entered(x, edge, part) for x, edge in zip(values, edges, strict=True)] if edges else [*values]
        enters = row[f"{part} enters"][0] if self.ring else None
        if not edges:
            edges = [jnp.zeros(x.shape[1:], x.dtype) for x in values]
        pairs = zip(values, edges, strict=True)
        return [shift_stages(x, edge, enters, backward=self._backward(part)) for x, edge in pairs]

    def sent(self, values: Sequence[Any], part: str, after: Sequence[Any]) -> list[Any]:
        """Return the results of stages after they have moved to the next stages, `[N, ...]`.

        Args:
            values: the results of each stage, `[N, ...]`.
            part: the part that has computed them.
            after: values that are computed before the move, because collectives that run at the same time share links.
        """
        if after:
            values = lax.optimization_barrier(([*values], [*after]))[0]
        return [shift_stages(x, backward=self._backward(part)) for x in values]

    def _backward(self, part: str) -> bool:
        return self.reverse == (part == FORWARD)

    def _entered(self, x: Any, edge: Any, part: str) -> Any:
        first = self.stages - 1 if self._backward(part) else 0
        return jnp.where(at_stage(x, first), edge, x)


def at_stage(x: Any, stage: int) -> Any:
    """Return a mask of one stage for values `[N, ...]` of all stages: `[N, 1, ...]`."""
    return (jnp.arange(x.shape[0]) == stage).reshape(-1, *[1] * (x.ndim - 1))
