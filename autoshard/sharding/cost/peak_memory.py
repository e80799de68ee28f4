"""How many bytes one device holds at the worst moment of a step.

    peak_bytes = state and data held throughout + max over the program's points of the live values' bytes

A value lives from the operator that makes it to the last that takes it; inside a loop, what stands outside and is used
inside lives until the loop ends. Values that XLA computes inside their users are never written (`fusion`); what they
are made of lives as long. Each value counts by its shard; what an operator leaves to be scattered is there while it
runs, and what several need gathered is gathered once and kept from the first to the last. State that is donated is
updated in place, and so is what a loop carries. Arrays that the function closes over are constants: whole on every
device. On a TPU an activation lies in tiles of 128 elements along one of its dimensions, the one that pads it least.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from autoshard import _compat
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.equivalence_classes import ValueClasses, pinned_apart, value_classes
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.spmdrules.core.placement import axes_of
from autoshard.spmdrules.ir.program import Block, inlined

LANES = 128  # elements of a tile of a TPU's memory along its minor dimension


class MemoryModel:
    """Prices layouts of one program; the live ranges are found once."""

    def __init__(
        self,
        axes: LogicalAxes,
        roles: Roles,
        fusion: Fusion,
        state: Sequence[tuple[int, int]] = (),
        *,
        is_tiled: bool = False,
    ):
        self.axes, self.roles, self.is_tiled = axes, roles, is_tiled
        program = axes.program
        n = len(program.avals)
        self.birth = np.full(n, -1)
        self.death = np.full(n, -1)
        self.written = np.zeros(n, bool)
        self.points = -1
        self.point = {id(op): number for number, op in enumerate(program.ops())}  # when an operator runs
        self.constant_bytes = float(sum(x.nbytes for x in _compat.constants(program.block.jaxpr)))
        self.written[list(fusion.written)] = True
        self.carried: list[int] = []  # what of a loop's inside lies where the loop's own operand or result does
        self._scan(program.block)
        self.narrow = fusion.narrow
        self.whole = self._whole()
        inputs = set(program.inputs)
        for out in set(program.outputs) - inputs:
            self.written[out] = True
            self.death[out] = self.points
        for _, out in state:
            self.written[out] = out in inputs  # donated: written over the input
        self.held_throughout = np.zeros(n, bool)
        self.held_throughout[list(inputs)] = True
        self.written[self.carried] = False
        keep = np.flatnonzero(self.written & (self.birth >= 0) & ~self.held_throughout)
        self.keep = keep
        self.sized = [*program.inputs, *keep.tolist()]
        self.of_role = {
            role: np.array([v for v in program.inputs if roles.inputs[v] == role], int)
            for role in ("parameter", "optimizer", "data", "other")
        }
        self._kinds: dict[frozenset[int], ValueClasses] = {}

    def resized(self, axes: LogicalAxes) -> MemoryModel:
        """The same model of a program with the same operators, on axes of other sizes (`padding.lengthened`)."""
        made = copy(self)
        made.axes = axes
        made.whole = made._whole()
        return made

    def _whole(self) -> np.ndarray:
        """The bytes of each value on one device alone."""
        whole = np.array([nbytes(a) for a in self.axes.program.avals], float)
        for v, part in self.narrow.items():
            whole[v] *= part
        return whole

    def _scan(self, block: Block) -> None:
        ops = list(inlined(block))
        for op in ops:
            start = self.points = self.point[id(op)]
            for inner in op.blocks:
                for v in inner.inputs:
                    if self.birth[v] < 0:
                        self.birth[v] = self.points
                self._scan(inner)
                for v in inner.outputs:
                    self.death[v] = max(self.death[v], self.points)
            inside = {v for tie in op.ties if not tie.stacked for v in (tie.inner, tie.outer)}
            inside -= {*op.operands, *op.results}
            if op.name == "scan" and op.eqn.params["length"] == 1:  # compiled as no loop: a stack of one is its slice
                inside |= {tie.inner for tie in op.ties if tie.stacked}
            self.carried += [v for v in sorted(inside) if self.birth[v] >= start]
            for v in op.operands:
                if v >= 0:
                    self.death[v] = self.points
            for v in op.results:
                if self.birth[v] < 0:
                    self.birth[v] = start
                self.death[v] = max(self.death[v], self.points)
        for op in reversed(ops):  # what is computed inside its users holds what it is computed from until then
            if not op.blocks and not any(self.written[v] for v in op.results):
                last = max((int(self.death[v]) for v in op.results), default=-1)
                for v in op.operands:
                    if v >= 0:
                        self.death[v] = max(self.death[v], last)

    def __call__(self, layout: Layout, waiting: Sequence[LiveBuffers] = ()) -> tuple[float, dict[str, float]]:
        """Peak bytes on one device, and their kinds: parameters, optimizer, data and other, temporaries.

        Args:
            layout: the layout.
            waiting: what is gathered for operators, or waits behind them to be scattered.
        """
        local = self._local(layout)
        held = {role: float(local[values].sum()) for role, values in self.of_role.items()}
        if self.constant_bytes:
            held["constant"] = self.constant_bytes
        held["temporary"] = float(self._live(local, waiting).max(initial=0.0)) + sum(
            float(self.whole[v]) / layout.ways(axes_of(layout.spec(v))) for v in layout.gathered_early
        )
        return sum(held.values()), held

    def at_peak(self, layout: Layout, waiting: Sequence[LiveBuffers] = ()) -> list[tuple[int, float]]:
        """The temporaries that are held at the worst moment, the largest first: (value, bytes on one device)."""
        local = self._local(layout)
        moment = int(self._live(local, waiting).argmax())
        held = [v for v in self.keep.tolist() if self.birth[v] <= moment <= self.death[v]]
        return sorted(((v, float(local[v])) for v in held), key=lambda item: -item[1])

    def kinds_at_peak(self, layout: Layout, waiting: Sequence[LiveBuffers] = ()) -> dict[str, float]:
        """What the temporaries of the worst moment are, in bytes on one device; they sum to the kind `temporary`.

        Returns:
            `activation`: what has the batch in it, kept for the backward pass or in use; `gradient`: what is made by
            summing over it; `temporary`: the rest: gathered or cast parameters, sums that wait to be scattered.
        """
        batch, found = self.roles.batch, {"activation": 0.0, "gradient": 0.0}
        for v, size in self.at_peak(layout, waiting):
            if any(batch in dim for dim in self.axes.of_value[v]):
                found["activation"] += size
            elif v in self.roles.gradients:
                found["gradient"] += size
        whole = self(layout, waiting)[1]["temporary"]
        return found | {"temporary": max(whole - sum(found.values()), 0.0)}

    def _local(self, layout: Layout) -> np.ndarray:
        """The bytes of each value on one device."""
        kinds = self.kinds(layout)
        parts = np.array([self._part(layout, v) for v in kinds.examples])
        local = np.zeros_like(self.whole)
        local[kinds.values] = self.whole[kinds.values] * parts[kinds.numbers]
        return local

    def _part(self, layout: Layout, value: int) -> float:
        """One device's part of a value, with what pads it."""
        spec, shape = operand_spec(layout, value), self.axes.program.avals[value].shape
        part = 1 / layout.ways(axes_of(spec))
        if not self.is_tiled or not any(self.roles.batch in dim for dim in self.axes.of_value[value]):
            return part  # dimensions of weights may lie together
        if any(not over and n % LANES == 0 for n, over in zip(shape, spec, strict=True)):
            return part
        local = [n // layout.ways(over) for n, over in zip(shape, spec, strict=True)]
        return part * min((-(-n // LANES) * LANES / n for n in local if n), default=1.0)

    def kinds(self, layout: Layout) -> ValueClasses:
        """The kinds of the values that have a size."""
        apart = pinned_apart(self.axes, self.roles, layout.fixed)
        if apart not in self._kinds:
            self._kinds[apart] = value_classes(self.axes, self.roles, self.sized, apart)
        return self._kinds[apart]

    def _live(self, local: np.ndarray, waiting: Sequence[LiveBuffers] = ()) -> np.ndarray:
        """The bytes of temporaries at each point of the program."""
        first, last, sizes = [self.birth[self.keep]], [self.death[self.keep]], [local[self.keep]]
        for some in waiting:
            if some.nbytes:
                first.append(some.first)
                last.append(some.last)
                sizes.append(np.full(len(some.first), some.nbytes))
        change = np.zeros(self.points + 2)
        np.add.at(change, np.concatenate(first), np.concatenate(sizes))
        np.subtract.at(change, np.concatenate(last) + 1, np.concatenate(sizes))
        return np.cumsum(change)
