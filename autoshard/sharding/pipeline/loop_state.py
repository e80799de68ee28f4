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
from autoshard.spmdrules.families.stages import shift_stages

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
    """Moves what stages make to the next stages.

    A part that takes values moves them first. If gradients of weights are computed apart, values move at the end of the
    tick instead, while the stages compute these gradients, which do not depend on them.

    Args:
        schedule: the ticks.
        reverse: whether the first stage has the last layers.
    """

    def __init__(self, schedule: Schedule, reverse: bool):
        self.stages, self.ring, self.reverse = schedule.stages, schedule.chunks > 1, reverse
        self.at_end = WEIGHTS in schedule.ticks

    def received(self, values: Sequence[Any], edges: Sequence[Any], row: dict[str, Any], part: str) -> list[Any]:
        """Return what each stage takes for a part.

        With several chunks, stages are a ring. The first stage gets the edges before its first chunk, else what the
        last one has made of the chunk before.

        Args:
            values: what each stage has made, `[N, ...]`; what has moved already, if values move at the end of a tick.
            edges: what the first stage takes, `[...]`; empty if nothing enters. Stages in a ring then take zeros.
            row: the tick's numbers.
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
        """Return what stages have made, `[N, ...]`, at the next stages.

        Args:
            values: what each stage has made.
            part: the part that has made it.
            after: values that are computed first. Collectives that run at once share the links.
        """
        if after:
            values = lax.optimization_barrier(([*values], [*after]))[0]
        return [shift_stages(x, backward=self._backward(part)) for x in values]

    def _backward(self, part: str) -> bool:
        return self.reverse == (part == FORWARD)

    def _entered(self, x: Any, edge: Any, part: str) -> Any:
        first = self.stages - 1 if self._backward(part) else 0
        mine = (jnp.arange(self.stages) == first).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(mine, edge, x)
