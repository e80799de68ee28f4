"""Loops and branches in a walk: a carry is a fixed point, what branches give meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard import _compat
from autoshard.spmdrules.core.placement import Placement, meet, partial_placement, replicated_placement
from autoshard.spmdrules.ir.program import Block, Op
from autoshard.spmdrules.propagation.walk_state import WalkState

Forward = Callable[[Block], None]  # walks over a block

_MAX_ROUNDS = 4  # a carry that has not settled by then meets where that is cheapest


@dataclass(frozen=True)
class Carry:
    """One carry of a loop.

    Attributes:
        operand: the number of the operand that it starts from.
        init: that operand's value; -1 for a literal.
        inner: the value inside, before a step.
        out: the value inside, after a step.
        result: the loop's result.
    """

    operand: int
    init: int
    inner: int
    out: int
    result: int


@dataclass(frozen=True)
class Loop:
    """A scan or while: its carries, inputs cut by steps (operand, outer, inner), results stacked (outer, inner)."""

    carries: list[Carry]
    xs: list[tuple[int, int, int]]
    ys: list[tuple[int, int]]
    trips: float

    @classmethod
    def of(cls, op: Op) -> Loop:
        """The parts of a loop."""
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


def loop(state: WalkState, op: Op, forward: Forward) -> None:
    """Places what a loop computes: its carries become a fixed point, then it is walked once."""
    parts = Loop.of(op)
    if op.name == "scan":
        state.enter(op, op.blocks[0])
    for i, outer, inner in parts.xs:
        here = state.place(outer)
        state.move(op, i, outer, Placement(((), *here.spec[1:]), here.partial))
        state.mark_zero(inner, outer in state.zeros)
    fixed = _fixed_point(state, op, parts, forward)
    for carry, place in zip(parts.carries, fixed, strict=True):
        zero = state.is_zero(op, carry.operand)
        state.move(
            op, carry.operand, carry.init, Placement(place.spec, state.place(carry.init).partial) if zero else place
        )
        state.places[carry.inner] = place
    _place_slices(state, parts)
    _run_body(state, op, forward)
    for j, (carry, place) in enumerate(zip(parts.carries, fixed, strict=True)):
        _move_out(state, op, j, carry.out, place, parts.trips)
        state.places[carry.result] = place
        state.mark_zero(carry.result, False)
    for outer, inner in parts.ys:
        here = state.place(inner)
        state.places[outer] = Placement(((), *here.spec), here.partial)
        state.mark_zero(outer, inner in state.zeros)
    if state.learning:
        state.tie(op)


def _move_out(state: WalkState, op: Op, result: int, value: int, place: Placement, times: float | None = None) -> None:
    """Takes a result of a block where the operator leaves it; zeros are partial sums already."""
    target = Placement(place.spec, state.place(value).partial) if value in state.zeros else place
    state.move(op, -1 - result, value, target, times)


def _place_slices(state: WalkState, parts: Loop) -> None:
    """Places what a step takes of the inputs that are cut by steps: as partial as they are outside."""
    for _, outer, inner in parts.xs:
        here = state.place(outer)
        state.places[inner] = Placement(here.spec[1:], here.partial)


def _fixed_point(state: WalkState, op: Op, parts: Loop, forward: Forward) -> list[Placement]:
    """Places of the carries that a step keeps, found by walking steps that do not count.

    Partials of constants that a step needs whole are made whole before the loop.
    """
    recording, state.recording = state.recording, False
    carries = parts.carries
    shared = [v for v in op.operands if v >= 0]
    before = [state.place(v) for v in shared]
    starts = [_start(state, carry) for carry in carries]
    now, outs, settled = starts, starts, False
    for number in range(_MAX_ROUNDS):
        for carry, place in zip(carries, now, strict=True):
            state.places[carry.inner] = place
            # A sum that starts from zeros may be partial from its first step on.
            state.mark_zero(carry.inner, number == 0 and state.is_zero(op, carry.operand))
        _place_slices(state, parts)
        assumed = any(carry.inner in state.zeros for carry in carries)
        _run_body(state, op, forward)
        outs = [state.place(c.out) for c in carries]
        after = [_next_carry(state, op, *each) for each in zip(carries, starts, outs, strict=True)]
        settled, now = after == now and not assumed, after
        if settled:
            break
    if not settled:
        pairs = zip(carries, now, outs, strict=True)
        now = [meet([a.reduced, b.reduced], state.nbytes[c.inner], state.mesh) for c, a, b in pairs]
    state.recording = recording
    for i, (value, place) in enumerate(zip(shared, before, strict=True)):
        after_use, state.places[value] = state.place(value), place
        if after_use != place:
            state.move(op, i, value, after_use)
    return now


def _start(state: WalkState, carry: Carry) -> Placement:
    if carry.init >= 0:
        return state.place(carry.init)
    return replicated_placement(len(state.program.avals[carry.inner].shape))


def _next_carry(state: WalkState, op: Op, carry: Carry, start: Placement, out: Placement) -> Placement:
    """Where a carry goes next: where a step leaves it, partial only where it starts so, too."""
    if carry.out in state.zeros:
        return partial_placement(out.spec, start.partial)
    zero = state.is_zero(op, carry.operand)
    return Placement(out.spec, tuple(p for p in out.partial if p in start.partial or (zero and p[1] == "sum")))


def _run_body(state: WalkState, op: Op, forward: Forward) -> None:
    """One step of a loop."""
    for block in op.blocks:
        forward(block)
    if op.name == "while":
        (test,) = op.blocks[0].outputs
        state.move(op, -1, test, Placement(()))


def branches(state: WalkState, op: Op, forward: Forward) -> None:
    """Places what a cond computes: each branch by itself, then their results meet."""
    state.move(op, 0, op.operands[0], Placement(()))
    shared = [v for v in op.operands if v >= 0]
    for block in op.blocks:
        with state.apart(shared):
            state.enter(op, block, 1)
            forward(block)
    for j, result in enumerate(op.results):
        outs = [block.outputs[j] for block in op.blocks]
        places = [state.place(v) for v in outs]
        target = meet(_align_zeros(state, outs, places), state.nbytes[result], state.mesh)
        for value in outs:
            with state.apart(shared):
                _move_out(state, op, j, value, target, op.trips / len(outs))
        state.places[result] = target
        state.mark_zero(result, all(v in state.zeros for v in outs))
    if state.learning:
        state.tie(op)


def _align_zeros(state: WalkState, values: Sequence[int], places: Sequence[Placement]) -> list[Placement]:
    """The places, zeros being as partial as what the other branches give."""
    terms = {p.partial for v, p in zip(values, places, strict=True) if v not in state.zeros}
    if len(terms) != 1 or any(how != "sum" for _, how in next(iter(terms))):
        return list(places)
    (partial,) = terms
    pairs = zip(values, places, strict=True)
    return [partial_placement(p.spec, partial) if v in state.zeros else p for v, p in pairs]
