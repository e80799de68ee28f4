"""The walks over a program that find the placement of every value.

A propagation takes three steps:

1. Infer. Open values (arguments that the caller left open, constants, and results with dimensions of their own: iota,
   broadcasts, random bits) get their shardings from the operators that use them. Walks go forwards through the program
   and backwards from its results until nothing changes. The last of them finds the partials that some operator reduces.
2. Record. One more forward walk reduces those partials before their first use, so that none is reduced twice, and
   records every reshard.
3. Move the results to their requested specs.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from autoshard._shown import shown
from autoshard.spmdrules.core.conflict_resolution import Resolution
from autoshard.spmdrules.core.placement import (
    Placement,
    Spec,
    axes_of,
    from_partition_spec,
)
from autoshard.spmdrules.core.rule import POSITIONS
from autoshard.spmdrules.ir.liveness import live_ops
from autoshard.spmdrules.ir.program import Block, Op
from autoshard.spmdrules.propagation import control_flow
from autoshard.spmdrules.propagation.constants import MAX_INFERENCE_ROUNDS
from autoshard.spmdrules.propagation.open_shardings import OpenShardings
from autoshard.spmdrules.propagation.resolution_cache import OperatorMemo, ResolutionCache
from autoshard.spmdrules.propagation.walk_state import WalkState


@shown
class Walk(WalkState):
    """The walks over one program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The specs that uses of decided values need. Partial values are reduce-scattered directly to these.
        self._hints = OpenShardings(set(range(len(self.nbytes))) - self.inferred.open)
        self._cache = ResolutionCache(self.mesh, self.nbytes)
        self._memos: dict[Op, OperatorMemo] = {}
        self._live = live_ops(self.program)

    def run(self, goals: Sequence[Spec | None]) -> list[Placement]:
        """Runs all walks.

        Args:
            goals: the spec requested for each result, None where none is.

        Returns:
            The placements of the results.
        """
        if not self.infer(goals):
            self._reduced.clear()
            self.reset()
            self.forward(self.program.block)
        self.recording = True
        self.reset()
        self.forward(self.program.block)
        return [self.output(k, v, goal) for k, (v, goal) in enumerate(zip(self.program.outputs, goals, strict=True))]

    def infer(self, goals: Sequence[Spec | None]) -> bool:
        """Infers the specs of open values; returns whether they converged.

        If they did, the last forward walk has used the final specs, and it has found the partials that some operator
        reduces.
        """
        self.inferring = True
        for _ in range(MAX_INFERENCE_ROUNDS):
            self.inferred.changed = self._hints.changed = False
            self._reduced.clear()
            self.reset()
            self.forward(self.program.block)
            for v, goal in zip(self.program.outputs, goals, strict=True):
                if goal is not None:
                    self.infer_value(v, goal)
            self.backward(self.program.block)
            if not self.inferred.changed and not self._hints.changed:
                break
        self.inferring = False
        return not self.inferred.changed and not self._hints.changed

    def reset(self) -> None:
        """Resets the inputs to their given or inferred placements, and discards all other placements."""
        # The last entry is the placement of literals, whose number is -1.
        self.placements = [*[None] * len(self.program.avals), Placement(())]
        for v, place in zip(self.program.inputs, self.inputs, strict=True):
            self.placements[v] = Placement(self.inferred.specs.get(v, place.spec), place.partial)

    def forward(self, block: Block) -> None:
        """Finds the placement of every live value of a block, in program order."""
        live, apply = self._live, self.apply
        for op in block.ops:
            if op not in live:
                continue
            if op.rule is not None:
                apply(op)
                continue
            self._callers.append(op.eqn)
            if op.name in ("scan", "while"):
                control_flow.walk_loop(self, op, self.forward)
            elif op.name == "cond":
                control_flow.walk_branches(self, op, self.forward)
            else:
                self.enter(op, op.blocks[0])
                self.forward(op.blocks[0])
            self._callers.pop()

    def backward(self, block: Block) -> None:
        """Infers the specs of open values from their uses, in reverse program order.

        This walk directly follows a forward walk. It skips an operator if that walk left it stable, and if there is no
        inferred spec and no hint for its operands and results.
        """
        live, memos = self._live, self._memos
        inferred, hints = self.inferred.specs.keys(), self._hints.specs.keys()
        for op in reversed(block.ops):
            if op not in live:
                continue
            if op.rule is not None:
                memo, values = memos.get(op), (*op.operands, *op.results)
                if memo is None or not memo.stable or not inferred.isdisjoint(values) or not hints.isdisjoint(values):
                    self.infer_operands(op, self.resolve(op))
                continue
            self.infer_across_edges(op)
            for inner in reversed(op.blocks):
                self.backward(inner)
            self.infer_across_edges(op)

    def infer_operands(self, op: Op, memo: OperatorMemo) -> None:
        """Infers the specs of an operator's operands from its resolution."""
        inferred, hints = self.inferred.specs.keys(), self._hints.specs.keys()
        if memo.resolution is None:
            return
        if memo.in_place and inferred.isdisjoint(op.operands) and hints.isdisjoint(op.operands):
            return  # there is nothing to infer
        for value, target in zip(op.operands, memo.resolution.operands, strict=True):
            if value >= 0:
                self.infer_value(value, target.spec)

    def infer_value(self, value: int, spec: Spec) -> None:
        """Extends the inferred spec of an open value by what a use needs; for a decided value, adds a hint."""
        current = self.placement(value)
        if value in self.inferred.open:
            self.inferred.add(value, current.spec, spec, current.partial)
        else:
            self._hints.add(value, current.spec, spec)

    def resolve(self, op: Op) -> OperatorMemo:
        """Resolves an operator; returns its memo, whose `resolution` is up to date."""
        memo = self._memos.get(op)
        if memo is None:
            memo = self._memos[op] = OperatorMemo.of(op, self.mesh)
        known, zeros, specs = self.placements, self.zeros, self.inferred.specs
        placements = [known[v] or self.placement(v) for v in op.operands]
        is_zero = memo.zero_literals
        if not zeros.isdisjoint(op.operands):
            is_zero = [v in zeros or literal for v, literal in zip(op.operands, is_zero, strict=True)]
        fixed = memo.fixed
        if memo.is_constraint and (pinned := self.constraint(op)) is not None:
            fixed = Resolution((Placement(pinned),), (Placement(pinned),))
        if fixed is not None:
            memo.remember(op, placements, is_zero, [], fixed)
            return memo
        hints = self._hints.specs if any([place.partial for place in placements]) else {}
        requested = [specs.get(r, hints.get(r)) for r in op.results]
        if placements != memo.placements or requested != memo.requested or is_zero != memo.zeros:
            resolution = self._cache.resolve(op, memo.same_as, placements, is_zero, requested)
            memo.remember(op, placements, is_zero, requested, resolution)
        return memo

    def constraint(self, op: Op) -> Spec | None:
        """The spec that a user's sharding constraint gives a value; None if it names axes of another mesh."""
        spec = getattr(op.eqn.params.get("sharding", op.eqn.params.get("dst_sharding")), "spec", None)
        if spec is None:
            return None
        current = self.placement(op.operands[0])
        given = from_partition_spec(spec, len(current.spec))
        taken = set(axes_of(given))
        if not taken <= self.mesh.keys():
            return None
        free = {d for d, entry in enumerate(tuple(spec)) if entry is PartitionSpec.UNCONSTRAINED}
        free |= set(op.eqn.params.get("unconstrained_dims") or ())
        return tuple(
            tuple(a for a in before if a not in taken) if d in free else dim
            for d, (dim, before) in enumerate(zip(given, current.spec, strict=True))
        )

    def apply(self, op: Op) -> Resolution:
        """Moves the operands to where an operator needs them, places its results, and returns its resolution."""
        if self._reduced and not self.inferring:
            self.reduce_operands(op)
        memo = self.resolve(op)
        resolution = memo.resolution
        assert resolution is not None
        if self.inferring:
            self.infer_operands(op, memo)
        if self.recording or not memo.in_place:
            for i, (value, target) in enumerate(zip(op.operands, resolution.operands, strict=True)):
                self.move(op, i, value, target)
        zeros = self.zeros
        for j, (result, place) in enumerate(zip(op.results, resolution.results, strict=True)):
            self.placements[result] = place
            if memo.zero_results:
                zeros.add(result)
            elif zeros:
                zeros.discard(result)
            if place.partial:
                self.reduce_positions(op, j, place)
        return resolution

    def reduce_positions(self, op: Op, result: int, place: Placement) -> None:
        """Reduces partial positions (argmax, argmin) immediately: comparing them needs the operand's values there."""
        remaining = tuple((a, reduction) for a, reduction in place.partial if reduction not in POSITIONS)
        if remaining != place.partial:
            self.move(op, -1 - result, op.results[result], Placement(place.spec, remaining))

    def reduce_operands(self, op: Op) -> None:
        """Reduces those operands that a later operator reduces anyway."""
        for i, value in enumerate(op.operands):
            later = self._reduced.get(value)
            if later is not None and set(later.partial) < set(self.placement(value).partial):
                self.move(op, i, value, later)

    def output(self, number: int, value: int, goal: Spec | None) -> Placement:
        """Moves a result of the function to its requested spec."""
        target = self.placement(value) if goal is None else Placement(goal)
        if value in self._uses:
            self._uses[value].add(target.spec)
        self.record("output", number, value, target, 1.0, None)
        return target

    def corrected_spec(self, value: int) -> Spec:
        """The spec of an input: the one that all its uses need, if they need the same one, else its current spec."""
        found = self._uses[value]
        if len(found) == 1:
            return next(iter(found))
        return self.inferred.specs.get(value, self.inputs[self.program.inputs.index(value)].spec)
