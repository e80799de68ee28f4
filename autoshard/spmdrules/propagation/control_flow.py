"""Loops and branches in a walk: a carry is a fixed point, what branches give meets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard import _compat
from autoshard.spmdrules.core.placement import Place, meet, partial_place, replicated_place
from autoshard.spmdrules.ir.program import Op

if TYPE_CHECKING:
    from autoshard.spmdrules.propagation.walk import Walk

_ROUNDS = 4  # a carry that has not settled by then meets where that is cheapest


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


def loop(walk: Walk, op: Op) -> None:
    """Places what a loop computes: its carries become a fixed point, then it is walked once."""
    parts = Loop.of(op)
    if op.name == "scan":
        walk.enter(op, op.blocks[0])
    for i, outer, inner in parts.xs:
        here = walk.place(outer)
        walk.move(op, i, outer, Place(((), *here.spec[1:]), here.partial))
        walk.mark_zero(inner, outer in walk.zeros)
    fixed = _fixed_point(walk, op, parts)
    for carry, place in zip(parts.carries, fixed, strict=True):
        zero = walk.is_zero(op, carry.operand)
        walk.move(op, carry.operand, carry.init, Place(place.spec, walk.place(carry.init).partial) if zero else place)
        walk.places[carry.inner] = place
    _slice(walk, parts)
    _step(walk, op)
    for j, (carry, place) in enumerate(zip(parts.carries, fixed, strict=True)):
        _leave(walk, op, j, carry.out, place, parts.trips)
        walk.places[carry.result] = place
        walk.mark_zero(carry.result, False)
    for outer, inner in parts.ys:
        here = walk.place(inner)
        walk.places[outer] = Place(((), *here.spec), here.partial)
        walk.mark_zero(outer, inner in walk.zeros)
    if walk.learning:
        walk.tie(op)


def _leave(walk: Walk, op: Op, result: int, value: int, place: Place, times: float | None = None) -> None:
    """Takes a result of a block where the operator leaves it; zeros are partial sums already."""
    target = Place(place.spec, walk.place(value).partial) if value in walk.zeros else place
    walk.move(op, -1 - result, value, target, times)


def _slice(walk: Walk, parts: Loop) -> None:
    """Places what a step takes of the inputs that are cut by steps: as partial as they are outside."""
    for _, outer, inner in parts.xs:
        here = walk.place(outer)
        walk.places[inner] = Place(here.spec[1:], here.partial)


def _fixed_point(walk: Walk, op: Op, parts: Loop) -> list[Place]:
    """Places of the carries that a step keeps, found by walking steps that do not count.

    Partials of constants that a step needs whole are made whole before the loop.
    """
    recording, walk.recording = walk.recording, False
    carries = parts.carries
    shared = [v for v in op.operands if v >= 0]
    before = [walk.place(v) for v in shared]
    starts = [_start(walk, carry) for carry in carries]
    now, outs, settled = starts, starts, False
    for number in range(_ROUNDS):
        for carry, place in zip(carries, now, strict=True):
            walk.places[carry.inner] = place
            # A sum that starts from zeros may be partial from its first step on.
            walk.mark_zero(carry.inner, number == 0 and walk.is_zero(op, carry.operand))
        _slice(walk, parts)
        assumed = any(carry.inner in walk.zeros for carry in carries)
        _step(walk, op)
        outs = [walk.place(c.out) for c in carries]
        after = [_kept(walk, op, *each) for each in zip(carries, starts, outs, strict=True)]
        settled, now = after == now and not assumed, after
        if settled:
            break
    if not settled:
        pairs = zip(carries, now, outs, strict=True)
        now = [meet([a.whole, b.whole], walk.nbytes[c.inner], walk.mesh) for c, a, b in pairs]
    walk.recording = recording
    for i, (value, place) in enumerate(zip(shared, before, strict=True)):
        after_use, walk.places[value] = walk.place(value), place
        if after_use != place:
            walk.move(op, i, value, after_use)
    return now


def _start(walk: Walk, carry: Carry) -> Place:
    if carry.init >= 0:
        return walk.place(carry.init)
    return replicated_place(len(walk.program.avals[carry.inner].shape))


def _kept(walk: Walk, op: Op, carry: Carry, start: Place, out: Place) -> Place:
    """Where a carry goes next: where a step leaves it, partial only where it starts so, too."""
    if carry.out in walk.zeros:
        return partial_place(out.spec, start.partial)
    zero = walk.is_zero(op, carry.operand)
    return Place(out.spec, tuple(p for p in out.partial if p in start.partial or (zero and p[1] == "sum")))


def _step(walk: Walk, op: Op) -> None:
    """One step of a loop."""
    for block in op.blocks:
        walk.forward(block)
    if op.name == "while":
        (test,) = op.blocks[0].outputs
        walk.move(op, -1, test, Place(()))


def branches(walk: Walk, op: Op) -> None:
    """Places what a cond computes: each branch by itself, then their results meet."""
    walk.move(op, 0, op.operands[0], Place(()))
    shared = [v for v in op.operands if v >= 0]
    for block in op.blocks:
        with walk.apart(shared):
            walk.enter(op, block, 1)
            walk.forward(block)
    for j, result in enumerate(op.results):
        outs = [block.outputs[j] for block in op.blocks]
        places = [walk.place(v) for v in outs]
        target = meet(_like_others(walk, outs, places), walk.nbytes[result], walk.mesh)
        for value in outs:
            with walk.apart(shared):
                _leave(walk, op, j, value, target, op.trips / len(outs))
        walk.places[result] = target
        walk.mark_zero(result, all(v in walk.zeros for v in outs))
    if walk.learning:
        walk.tie(op)


def _like_others(walk: Walk, values: Sequence[int], places: Sequence[Place]) -> list[Place]:
    """The places, zeros being as partial as what the other branches give."""
    terms = {p.partial for v, p in zip(values, places, strict=True) if v not in walk.zeros}
    if len(terms) != 1 or any(how != "sum" for _, how in next(iter(terms))):
        return list(places)
    (partial,) = terms
    pairs = zip(values, places, strict=True)
    return [partial_place(p.spec, partial) if v in walk.zeros else p for v, p in pairs]
