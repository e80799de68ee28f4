"""Loops and branches in a walk: a carry is a fixed point, and the results of branches meet in one placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.core.placement import Placement, meet, partial_placement, replicated_placement
from autoshard.spmdrules.ir.program import Block, Op
from autoshard.spmdrules.propagation.constants import MAX_CARRY_ROUNDS
from autoshard.spmdrules.propagation.walk_state import WalkState

Forward = Callable[[Block], None]  # finds the placements of a block's values


@shown
@dataclass(frozen=True)
class Carry:
    """One carry of a loop.

    Attributes:
        operand: the number of the operand that is its initial value.
        init: the initial value outside the loop; -1 for a literal.
        inner: the body's input.
        out: the body's output.
        result: the loop's result.
    """

    operand: int
    init: int
    inner: int
    out: int
    result: int


@shown
@dataclass(frozen=True)
class Loop:
    """The parts of a scan or while loop.

    Attributes:
        carries: its carries.
        xs: `(operand number, outer value, inner value)` of each input that is sliced by iteration.
        ys: `(outer value, inner value)` of each result that is stacked by iteration.
        trips: how often the body runs in one run of the program; a while loop counts as one iteration.
    """

    carries: list[Carry]
    xs: list[tuple[int, int, int]]
    ys: list[tuple[int, int]]
    trips: float

    @classmethod
    def of(cls, op: Op) -> Loop:
        """Returns the parts of a loop."""
        block, params = op.blocks[-1], op.eqn.params
        if op.name == "scan":
            first, count = _compat.scan_arity(params)
            inner, trips = block.inputs[first:], op.trips * params["length"]
        else:
            first = params["cond_nconsts"] + params["body_nconsts"]
            count, trips = len(op.operands) - first, op.trips
            inner = block.inputs[params["body_nconsts"] :]
        carries = [
            Carry(first + k, op.operands[first + k], inner[k], block.outputs[k], op.results[k]) for k in range(count)
        ]
        xs = [(i, op.operands[i], block.inputs[i]) for i in range(first + count, len(op.operands))]
        return cls(carries, xs, list(zip(op.results[count:], block.outputs[count:], strict=True)), trips)


def walk_loop(state: WalkState, op: Op, forward: Forward) -> None:
    """Finds the placements of a loop's values: first the fixed point of its carries, then one walk over its body."""
    parts = Loop.of(op)
    if op.name == "scan":
        state.enter(op, op.blocks[0])
    for i, outer, inner in parts.xs:
        current = state.placement(outer)
        state.move(op, i, outer, Placement(((), *current.spec[1:]), current.partial))
        state.mark_zero(inner, outer in state.zeros)
    fixed = _fixed_point(state, op, parts, forward)
    for carry, place in zip(parts.carries, fixed, strict=True):
        zero = state.is_zero(op, carry.operand)
        target = Placement(place.spec, state.placement(carry.init).partial) if zero else place
        state.move(op, carry.operand, carry.init, target)
        state.placements[carry.inner] = place
    _place_slices(state, parts)
    _run_body(state, op, forward)
    for j, (carry, place) in enumerate(zip(parts.carries, fixed, strict=True)):
        _move_out(state, op, j, carry.out, place, parts.trips)
        state.placements[carry.result] = place
        state.mark_zero(carry.result, False)
    for outer, inner in parts.ys:
        current = state.placement(inner)
        state.placements[outer] = Placement(((), *current.spec), current.partial)
        state.mark_zero(outer, inner in state.zeros)
    if state.inferring:
        state.infer_across_edges(op)


def _move_out(state: WalkState, op: Op, result: int, value: int, place: Placement, times: float | None = None) -> None:
    """Moves a block's output to the placement of the operator's result. Zeros are partial sums over any axis."""
    target = Placement(place.spec, state.placement(value).partial) if value in state.zeros else place
    state.move(op, -1 - result, value, target, times)


def _place_slices(state: WalkState, parts: Loop) -> None:
    """Places the slices that one iteration reads: they are partial over the same axes as the whole input."""
    for _, outer, inner in parts.xs:
        current = state.placement(outer)
        state.placements[inner] = Placement(current.spec[1:], current.partial)


def _fixed_point(state: WalkState, op: Op, parts: Loop, forward: Forward) -> list[Placement]:
    """Returns placements of the carries that an iteration preserves, found by walks that record nothing.

    If an iteration reduces a partial constant, the constant is reduced before the loop instead.
    """
    recording, state.recording = state.recording, False
    carries = parts.carries
    shared = [v for v in op.operands if v >= 0]
    before = [state.placement(v) for v in shared]
    starts = [_start(state, carry) for carry in carries]
    now, outs, converged = starts, starts, False
    for number in range(MAX_CARRY_ROUNDS):
        for carry, place in zip(carries, now, strict=True):
            state.placements[carry.inner] = place
            # A sum that starts from zeros may be partial from its first iteration on.
            state.mark_zero(carry.inner, number == 0 and state.is_zero(op, carry.operand))
        _place_slices(state, parts)
        assumed_zero = any(carry.inner in state.zeros for carry in carries)
        _run_body(state, op, forward)
        outs = [state.placement(c.out) for c in carries]
        after = [_next_carry(state, op, *each) for each in zip(carries, starts, outs, strict=True)]
        converged, now = after == now and not assumed_zero, after
        if converged:
            break
    if not converged:
        pairs = zip(carries, now, outs, strict=True)
        now = [meet([a.reduced, b.reduced], state.nbytes[c.inner], state.mesh) for c, a, b in pairs]
    state.recording = recording
    for i, (value, place) in enumerate(zip(shared, before, strict=True)):
        after_use, state.placements[value] = state.placement(value), place
        if after_use != place:
            state.move(op, i, value, after_use)
    return now


def _start(state: WalkState, carry: Carry) -> Placement:
    if carry.init >= 0:
        return state.placement(carry.init)
    return replicated_placement(len(state.program.avals[carry.inner].shape))


def _next_carry(state: WalkState, op: Op, carry: Carry, start: Placement, out: Placement) -> Placement:
    """Returns the placement of a carry after an iteration.

    It is partial only over axes over which the initial value is partial, too. Zeros are partial sums over any axis.
    """
    if carry.out in state.zeros:
        return partial_placement(out.spec, start.partial)
    zero = state.is_zero(op, carry.operand)
    return Placement(out.spec, tuple(p for p in out.partial if p in start.partial or (zero and p[1] == "sum")))


def _run_body(state: WalkState, op: Op, forward: Forward) -> None:
    """Walks over one iteration of a loop."""
    for block in op.blocks:
        forward(block)
    if op.name == "while":
        (test,) = op.blocks[0].outputs
        state.move(op, -1, test, Placement(()))


def walk_branches(state: WalkState, op: Op, forward: Forward) -> None:
    """Finds the placements of a cond's values: each branch separately, then their results meet."""
    state.move(op, 0, op.operands[0], Placement(()))
    shared = [v for v in op.operands if v >= 0]
    for block in op.blocks:
        with state.isolated(shared):
            state.enter(op, block, 1)
            forward(block)
    for j, result in enumerate(op.results):
        outs = [block.outputs[j] for block in op.blocks]
        places = [state.placement(v) for v in outs]
        target = meet(_align_zeros(state, outs, places), state.nbytes[result], state.mesh)
        for value in outs:
            with state.isolated(shared):
                _move_out(state, op, j, value, target, op.trips / len(outs))
        state.placements[result] = target
        state.mark_zero(result, all(v in state.zeros for v in outs))
    if state.inferring:
        state.infer_across_edges(op)


def _align_zeros(state: WalkState, values: Sequence[int], places: Sequence[Placement]) -> list[Placement]:
    """Returns the placements, with zeros partial over the same axes as the results of the other branches."""
    partials = {p.partial for v, p in zip(values, places, strict=True) if v not in state.zeros}
    if len(partials) != 1 or any(reduction != "sum" for _, reduction in next(iter(partials))):
        return list(places)
    (partial,) = partials
    pairs = zip(values, places, strict=True)
    return [partial_placement(p.spec, partial) if v in state.zeros else p for v, p in pairs]
