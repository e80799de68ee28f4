"""The inputs of stages that wait in slots, where a schedule keeps no residuals.

In the forward part, a stage keeps what enters it: the carry, and the values that travel with it. In the backward part,
it computes its layers again from this input. The residuals exist only within that tick, for one microbatch. The slot of
the input is free after its tick, so the next microbatch may take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autoshard.sharding.pipeline.microbatch_values import Env
from autoshard.sharding.pipeline.schedules import FORWARD, RECOMPUTE, Schedule, Slots
from autoshard.sharding.pipeline.stage_cut import StageCut
from autoshard.spmdrules.families.stacked.stages import read_slots, write_slots


class StageInputs:
    """Keeps the inputs of the stages, and computes the layers again from them.

    Args:
        cut: the program of one microbatch, cut.
        schedule: the ticks. If no tick recomputes, nothing waits.
    """

    def __init__(self, cut: StageCut, schedule: Schedule):
        self.stack, self.forth = cut.forward, cut.forth
        self.recompute = RECOMPUTE in schedule.ticks
        self.variables = [*self.stack.carry, *cut.forth] if self.recompute else []

    def empty(self, slots: Mapping[str, Slots], stages: int) -> list[Any]:
        """Return zeros `[S, N, ...]` for each input."""
        count = slots["inputs"].count if self.variables else 0
        return [jnp.zeros((count, stages, *v.aval.shape), v.aval.dtype) for v in self.variables]

    def kept(self, slots: Sequence[Any], moved: Sequence[Any], row: Env) -> list[Any]:
        """Return the slots after a forward part.

        Args:
            slots: the slots before it.
            moved: what has entered each stage, `[N, ...]`.
            row: the tick's numbers.
        """
        index = row[f"inputs {FORWARD}"] if self.recompute else None
        return [write_slots(s, x, index) for s, x in zip(slots, moved, strict=False)]

    def run_again(self, slots: Sequence[Any], row: Env, layers: Callable[..., Any]) -> tuple[Env, list[Any]]:
        """Run each stage's layers again, from its input.

        Args:
            slots: the slots.
            row: the tick's numbers.
            layers: runs the layers of each stage, see `StageLoop.layers`.

        Returns:
            What the layers stack, `[N, layers of a stage, ...]`, and what leaves each stage, `[N, ...]`.
        """
        inputs = [read_slots(s, row[f"inputs {RECOMPUTE}"]) for s in slots]
        carry, travelling = inputs[: len(self.stack.carry)], inputs[len(self.stack.carry) :]
        known = dict(zip(self.forth, travelling, strict=True))
        chunk = row.get(f"{RECOMPUTE} chunk")
        carried, stacked = layers(self.stack, row[RECOMPUTE], known, carry, {}, chunk=chunk)
        return dict(zip(self.stack.stacked, stacked, strict=True)), [*carried, *travelling]
