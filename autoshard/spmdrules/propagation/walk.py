"""The walks over a program that place every value.

Three of them make a propagation:

1. What is open (arguments that the caller left to choose, constants, results with dimensions of their own: iota,
   broadcasts, random bits) learns from those that use it, forwards through the program and backwards from its
   results, until nothing more is learnt.
2. The last of these walks, with all of that known, finds which partials some operator needs whole; in the next they are
   made whole before their first use, so that none is reduced twice, and every reshard is recorded.
3. Results are taken to where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

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
from autoshard.spmdrules.propagation.open_shardings import OpenShardings
from autoshard.spmdrules.propagation.resolution_cache import OperatorMemo, ResolutionCache
from autoshard.spmdrules.propagation.walk_state import WalkState

_MAX_ROUNDS = 4


class Walk(WalkState):
    """The walks over one program."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Where users want values that are decided already: a partial on its way there is reduced to shards.
        self._hints = OpenShardings(set(range(len(self.nbytes))) - self.learnt.open)
        self._settlements = ResolutionCache(self.mesh, self.nbytes)
        self._seen: dict[Op, OperatorMemo] = {}
        self._live = live_ops(self.program)

    def run(self, goals: Sequence[Spec | None]) -> list[Placement]:
        """All walks.

        Args:
            goals: where the results are wanted, None where nothing says so.

        Returns:
            Where the results are.
        """
        if not self.learn(goals):
            self._whole.clear()
            self.start()
            self.forward(self.program.block)
        self.recording = True
        self.start()
        self.forward(self.program.block)
        return [self.output(k, v, goal) for k, (v, goal) in enumerate(zip(self.program.outputs, goals, strict=True))]

    def learn(self, goals: Sequence[Spec | None]) -> bool:
        """Lets open values learn, until nothing more is learnt; whether that came to an end.

        The last walk forwards is then one with all of that known, which finds what some operator needs whole.
        """
        self.learning = True
        for _ in range(_MAX_ROUNDS):
            self.learnt.changed = self._hints.changed = False
            self._whole.clear()
            self.start()
            self.forward(self.program.block)
            for v, goal in zip(self.program.outputs, goals, strict=True):
                if goal is not None:
                    self.learn_of(v, goal)
            self.backward(self.program.block)
            if not self.learnt.changed and not self._hints.changed:
                break
        self.learning = False
        return not self.learnt.changed and not self._hints.changed

    def start(self) -> None:
        """Puts the arguments where they are given or learnt."""
        self.places = [*[None] * len(self.program.avals), Placement(())]  # the last is that of literals, number -1
        for v, place in zip(self.program.inputs, self.inputs, strict=True):
            self.places[v] = Placement(self.learnt.specs.get(v, place.spec), place.partial)

    def forward(self, block: Block) -> None:
        """Places every value of a block, in order; what nobody uses asks for nothing."""
        live, apply = self._live, self.apply
        for op in block.ops:
            if op not in live:
                continue
            if op.rule is not None:
                apply(op)
                continue
            self._callers.append(op.eqn)
            if op.name in ("scan", "while"):
                control_flow.loop(self, op, self.forward)
            elif op.name == "cond":
                control_flow.branches(self, op, self.forward)
            else:
                self.enter(op, op.blocks[0])
                self.forward(op.blocks[0])
            self._callers.pop()

    def backward(self, block: Block) -> None:
        """Lets open values learn from what uses them, in reverse order.

        The walk forwards has just been here: where it found all at rest, and nothing is known of what an operator takes
        and gives, there is nothing to learn.
        """
        live, seen_of, learnt, hints = self._live, self._seen, self.learnt.specs.keys(), self._hints.specs.keys()
        for op in reversed(block.ops):
            if op not in live:
                continue
            if op.rule is not None:
                seen, values = seen_of.get(op), (*op.operands, *op.results)
                if seen is None or not seen.stable or not learnt.isdisjoint(values) or not hints.isdisjoint(values):
                    self.learn_operands(op, self.resolve(op))
                continue
            self.tie(op)
            for inner in reversed(op.blocks):
                self.backward(inner)
            self.tie(op)

    def learn_operands(self, op: Op, seen: OperatorMemo) -> None:
        """Lets the open operands of an operator follow what it takes."""
        known = self.learnt.specs.keys(), self._hints.specs.keys()
        if seen.resolution is None or (seen.in_place and all([specs.isdisjoint(op.operands) for specs in known])):
            return  # they are there
        for value, target in zip(op.operands, seen.resolution.operands, strict=True):
            if value >= 0:
                self.learn_of(value, target.spec)

    def learn_of(self, value: int, spec: Spec) -> None:
        """Lets a value follow where some use wants it, or notes the wish if it is decided already."""
        here = self.place(value)
        if value in self.learnt.open:
            self.learnt.add(value, here.spec, spec, here.partial)
        else:
            self._hints.add(value, here.spec, spec)

    def resolve(self, op: Op) -> OperatorMemo:
        """How an operator is cut: `settled` of what it returns says so."""
        seen = self._seen.get(op)
        if seen is None:
            seen = self._seen[op] = OperatorMemo.of(op, self.mesh)
        here, zeros, specs = self.places, self.zeros, self.learnt.specs
        places = [here[v] or self.place(v) for v in op.operands]
        zero = seen.zero_literals
        if not zeros.isdisjoint(op.operands):
            zero = [v in zeros or said for v, said in zip(op.operands, zero, strict=True)]
        fixed = seen.fixed
        if seen.is_constraint and (pinned := self.constraint(op)) is not None:
            fixed = Resolution((Placement(pinned),), (Placement(pinned),))
        if fixed is not None:
            seen.remember(op, places, zero, [], fixed)
            return seen
        hints = self._hints.specs if any([place.partial for place in places]) else {}
        wanted = [specs.get(r, hints.get(r)) for r in op.results]
        if places != seen.placements or wanted != seen.requested or zero != seen.zeros:
            seen.remember(op, places, zero, wanted, self._settlements.of(op, seen.same_as, places, zero, wanted))
        return seen

    def constraint(self, op: Op) -> Spec | None:
        """The spec that the user's own constraint gives a value, if it speaks of this mesh."""
        spec = getattr(op.eqn.params.get("sharding", op.eqn.params.get("dst_sharding")), "spec", None)
        if spec is None:
            return None
        here = self.place(op.operands[0])
        said = from_partition_spec(spec, len(here.spec))
        taken = set(axes_of(said))
        if not taken <= self.mesh.keys():
            return None
        free = {d for d, entry in enumerate(tuple(spec)) if entry is PartitionSpec.UNCONSTRAINED}
        free |= set(op.eqn.params.get("unconstrained_dims") or ())
        return tuple(
            tuple(a for a in now if a not in taken) if d in free else dim
            for d, (dim, now) in enumerate(zip(said, here.spec, strict=True))
        )

    def apply(self, op: Op) -> Resolution:
        """Takes the operands where an operator needs them, and places its results; says how it is cut."""
        if self._whole and not self.learning:
            self.make_whole(op)
        seen = self.resolve(op)
        settled = seen.resolution
        assert settled is not None
        if self.learning:
            self.learn_operands(op, seen)
        if self.recording or not seen.in_place:
            for i, (value, target) in enumerate(zip(op.operands, settled.operands, strict=True)):
                self.move(op, i, value, target)
        zeros = self.zeros
        for j, (result, place) in enumerate(zip(op.results, settled.results, strict=True)):
            self.places[result] = place
            if seen.zero_results:
                zeros.add(result)
            elif zeros:
                zeros.discard(result)
            if place.partial:
                self.decide_positions(op, j, place)
        return settled

    def decide_positions(self, op: Op, result: int, place: Placement) -> None:
        """Makes positions whole at once: they mean nothing without their values."""
        lasting = tuple((a, how) for a, how in place.partial if how not in POSITIONS)
        if lasting != place.partial:
            self.move(op, -1 - result, op.results[result], Placement(place.spec, lasting))

    def make_whole(self, op: Op) -> None:
        """Makes those operands whole now that some later operator needs whole."""
        for i, value in enumerate(op.operands):
            later = self._whole.get(value)
            if later is not None and set(later.partial) < set(self.place(value).partial):
                self.move(op, i, value, later)

    def output(self, number: int, value: int, goal: Spec | None) -> Placement:
        """Takes a result of the function where it is wanted."""
        target = self.place(value) if goal is None else Placement(goal)
        if value in self._uses:
            self._uses[value].add(target.spec)
        self.record("output", number, value, target, 1.0, None)
        return target

    def corrected(self, value: int) -> Spec:
        """The spec of an argument: what all of its uses want, else where it is."""
        found = self._uses[value]
        if len(found) == 1:
            return next(iter(found))
        return self.learnt.specs.get(value, self.inputs[self.program.inputs.index(value)].spec)
