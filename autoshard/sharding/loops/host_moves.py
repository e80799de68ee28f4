"""Chooses when loops over layers move slices of stacks in host memory, and which slices stay on the device.

    fetched now     in the iteration that uses the slice, from the start of the iteration on
    fetched ahead   one iteration before; the carry of the scan holds the slice
    sent now        in the iteration that computes the result
    kept            the last iteration's result stays in device memory, and the next scan begins with it

A slice is fetched now if it is needed in the second half of the iteration's FLOPs, and if the compute before that is as
long as the fetch; else ahead. If all fetches of an iteration take longer than its compute, only the first condition
counts: the device waits for the link anyway. GPT 1.3B with six layers, compiled for v6e:2x4 (`dp:2 tp:4`, 128 rows of
1024 tokens, `host:qkv+context+mlp_in`), takes 275 ms. With keys and values fetched ahead, because they come after the
queries, it takes 295 ms, and its memory is 7 % larger.

A slice is needed when the first product or inner loop uses it or a value that other operators compute from it. Those
operators can wait. A result is sent now if it is computed in the first half of the FLOPs. XLA schedules the other
sends. The bounds are `FETCHED_NOW_FROM` and `SENT_NOW_UNTIL`.

Slices are fetched one after the other, in the order in which they are needed. If several are needed at the same time,
the smallest is fetched first. XLA schedules a loop body backward and gives each fetch more compute than it needs, so
little compute is left for the first fetches.

A backward loop begins with what the forward loop has made last. If these values came back from the host, the device
would wait for them. So the forward loop keeps them, if the backward loop fetches the slices ahead. Otherwise a slice
has the compute of its iteration to come back.

Times are those of whole values on one device. Only their ratios count, and these are right if all values are sharded
over all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.loops.constants import FETCHED_NOW_FROM, SENT_NOW_UNTIL
from autoshard.sharding.loops.loop_times import LoopTimes
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.constants import HOST_BANDWIDTH_REACHED
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.operator_kinds import INLINED_CALLS
from autoshard.spmdrules.ir.program import Block, Op, Program, users_of


@shown
@dataclass(frozen=True)
class HostMoves:
    """When a scan moves slices. Numbers count the stacks that it slices, or its stacked results.

    Attributes:
        now: the stacks whose slices are fetched now, in this order.
        ahead: the stacks whose slices are fetched ahead, in this order.
        sent: the results that are sent now.
        done: for each of `sent`, the fraction of the iteration's products (in FLOPs) that run before it is computed.
        ready: the stacks of `ahead` whose first slice another scan keeps.
        kept: the results of which the last iteration's is kept.
    """

    now: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    done: tuple[float, ...] = ()
    ready: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


@shown
@dataclass(frozen=True)
class KeptSlice:
    """A slice that stays on the device between two scans.

    Attributes:
        maker: the scan whose last iteration makes it.
        sent: the value in host memory that the body of `maker` returns. Its other iterations send this value.
    """

    maker: Op
    sent: int


_known: WeakKeyDictionary[Program, dict[Chip, Mapping[int, HostMoves]]] = WeakKeyDictionary()


def host_moves(program: Program, chip: Chip) -> Mapping[int, HostMoves]:
    """Return when the scans of a program move slices on TPUs: `id` of a scan -> its moves, if it has any.

    A slice that is also used in host memory is not moved. A scan without an array in its carry moves nothing: a barrier
    needs a value that waits. A scan of one iteration is not compiled as a loop.

    Args:
        program: the program.
        chip: the device.
    """
    found = _known.setdefault(program, {})
    if chip not in found:
        found[chip] = _moves(program, chip)
    return found[chip]


def kept_slices(program: Program, moves: Mapping[int, HostMoves]) -> dict[int, KeptSlice]:
    """Return the slices that stay on the device between two scans.

    The keys are the slices in the body of the second scan. The values say how the first scan makes them.

    Args:
        program: the program.
        moves: the moves of its scans, by `host_moves`.
    """
    found = dict[int, KeptSlice]()
    for maker, k, taker, n in _pairs(program):
        if k in moves.get(id(maker), HostMoves()).kept:
            sent = maker.blocks[0].outputs[_arity(maker)[1] + k]
            found[taker.blocks[0].inputs[sum(_arity(taker)) + n]] = KeptSlice(maker, sent)
    return found


def can_wait(x: Any) -> bool:
    """Whether a barrier can make a value wait: whether it is an array, with dimensions."""
    return bool(getattr(x, "ndim", 0)) and not _compat.is_extended(x.dtype)


def _arity(scan: Op) -> tuple[int, int]:
    return _compat.scan_arity(scan.eqn.params)


def _pairs(program: Program) -> Iterator[tuple[Op, int, Op, int]]:
    """Yield the stacks in host memory that a scan makes and that only one other scan, in the other direction, takes.

    Yields:
        The first scan and the number of its stacked result; the second scan and the number of its stack.
    """
    if not any(map(_compat.is_on_host, program.avals)):
        return
    for block in (program.block, *(inner for op in program.ops() for inner in op.blocks)):
        users, outputs = users_of(block.ops), {*block.outputs}
        for maker in [op for op in block.ops if op.name == "scan"]:
            for k, stack in enumerate(maker.results[_arity(maker)[1] :]):
                takers, is_on_host = users.get(stack, []), _compat.is_on_host(program.avals[stack])
                if not is_on_host or len(takers) != 1 or takers[0].name != "scan" or stack in outputs:
                    continue
                one, other = maker.eqn.params, takers[0].eqn.params
                n = takers[0].operands.index(stack) - sum(_arity(takers[0]))
                if n >= 0 and one["length"] == other["length"] and one["reverse"] != other["reverse"]:
                    yield maker, k, takers[0], n


def _moves(program: Program, chip: Chip) -> dict[int, HostMoves]:
    loops = {id(op): _Loop(op, program.avals, chip) for op in program.ops() if op.name == "scan"}
    found = {key: loop.moves() for key, loop in loops.items()}
    for maker, k, taker, n in _pairs(program):
        one, other = found[id(maker)], found[id(taker)]
        if n in other.ahead and loops[id(maker)].can_keep(k):
            found[id(maker)] = replace(one, kept=(*one.kept, k))
            found[id(taker)] = replace(other, ready=(*other.ready, n))
    return {key: moves for key, moves in found.items() if moves != HostMoves()}


class _Loop:
    """A scan, and when its body uses and computes the slices that it can move.

    Attributes:
        takes: stack -> the FLOPs of an iteration before its slice is needed.
        makes: result -> the FLOPs of an iteration before it is computed.
    """

    def __init__(self, op: Op, avals: Sequence[Any], chip: Chip):
        self.block, self.avals, self.chip = op.blocks[0], avals, chip
        consts, carries = _arity(op)
        self.slices, self.results = self.block.inputs[consts + carries :], self.block.outputs[carries:]
        self.takes: dict[int, float] = {}
        self.makes: dict[int, float] = {}
        on_host = {v for v in (*self.slices, *self.results) if v >= 0 and _compat.is_on_host(avals[v])}
        carry = [avals[v] for v in self.block.inputs[consts : consts + carries]]
        if on_host and op.eqn.params["length"] > 1 and any(map(can_wait, carry)):
            self.times = times = LoopTimes(op)
            needed = {k: times.needed(v) for k, v in enumerate(self.slices) if v in on_host}
            made = {k: times.made(v) for k, v in enumerate(self.results) if v in on_host}
            self.takes = {k: flops for k, flops in needed.items() if flops is not None}
            self.makes = {k: flops for k, flops in made.items() if flops is not None}

    def moves(self) -> HostMoves:
        """Return when the scan moves slices, if no scan keeps any."""
        now, ahead, link_s = list[int](), list[int](), 0.0
        can_hide = bool(self.takes) and sum(map(self.fetch_s, self.takes)) <= self.compute_s(self.times.total)
        for k in sorted(self.takes, key=lambda k: (self.takes[k], self.nbytes(k))):
            fetch_s = link_s + self.fetch_s(k)
            is_late = self.takes[k] >= self.times.total * FETCHED_NOW_FROM
            if is_late and (fetch_s <= self.compute_s(self.takes[k]) or not can_hide):
                now.append(k)
                link_s = fetch_s
            else:
                ahead.append(k)
        sent = tuple(k for k, flops in self.makes.items() if flops <= self.times.total * SENT_NOW_UNTIL)
        done = tuple(self.times.done(self.results[k]) for k in sent)
        return HostMoves(tuple(now), tuple(ahead), sent, done)

    def nbytes(self, k: int) -> int:
        """The bytes of a slice."""
        return nbytes(self.avals[self.slices[k]])

    def compute_s(self, flops: float) -> float:
        """The seconds that FLOPs take."""
        return flops / (self.chip.flops * self.chip.efficiency)

    def fetch_s(self, k: int) -> float:
        """The seconds that the fetch of a slice takes; 0 if the bandwidth of the host is unknown."""
        bandwidth = self.chip.host_bandwidth * HOST_BANDWIDTH_REACHED
        return self.nbytes(k) / bandwidth if bandwidth else 0.0

    def can_keep(self, k: int) -> bool:
        """Whether the body transfers a result itself, so that it can return the value on the device, too."""
        return k in self.makes and any(self.results[k] in op.results for op in _written_out(self.block))


def _written_out(block: Block) -> Iterator[Op]:
    """Yield the operators of a block and of calls that are written out when a program is lowered."""
    for op in block.ops:
        if op.name in INLINED_CALLS:
            yield from _written_out(op.blocks[0])
        else:
            yield op
