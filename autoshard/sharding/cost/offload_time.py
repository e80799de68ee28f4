"""The time of transfers between the memory of a device and that of its host, and the part that compute does not hide.

    time     = bytes of the shards / (HOST_BANDWIDTH_REACHED x the chip's host bandwidth)
    busy     = max(time of transfers to the host, time of transfers from it), for each loop body and each stretch of
               straight code
    first    = time of the transfers from the host that the first iteration of a loop needs, each time the loop starts
    late     = the largest sum of these two, over the results that a loop on a TPU sends in their own iteration: the
               compute of the body until the result is there, and the time to send it and all later results
    exposed  = first + max(0, busy - first - compute of the same body or stretch, late - compute of the body)

The link carries both directions at once. Compilers start a transfer, and wait for its end, in the loop body or straight
code that contains it. So only the compute there can hide it. A nested loop body does not count: it is a stretch of its
own. If one stretch contains the forward and the backward pass, as with unrolled layers, all of its compute may hide
transfers of both directions. The compiler's own schedule of transfers is in the audit (`hlo.host_transfers`).

On tpu7x compute hides no fetches (`Chip.hides_fetches`): `first` is the time of all transfers from the host. On GPUs
nothing hides transfers, and the two directions take turns (`machines.constants.EXPOSED_TRANSFERS`): all of their time
is exposed.

On TPUs, the program says when loops move slices (`loops.host_moves`), so that all compute of an iteration can hide
them. Only the compute after a result hides its transfer, if it is sent in its own iteration. The last iteration of a
forward loop does not send what it keeps for the backward loop, and the first iteration of the backward loop does not
wait for it. It waits for its other slices: nothing hides their fetches. Slices that are fetched in their own iteration
have the same price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.equivalence_classes import value_classes
from autoshard.sharding.cost.stretches import Stretches, StretchTimes
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.layout.operator_sharding import operand_spec
from autoshard.sharding.loops.host_moves import HostMoves, host_moves, kept_slices
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.constants import EXPOSED_TRANSFERS, HOST_BANDWIDTH_REACHED
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.host_memory import is_host_transfer
from autoshard.spmdrules.core.placement import axes_of
from autoshard.spmdrules.ir.program import Op, Program, walk


@shown
@dataclass(frozen=True)
class HostTime:
    """Transfers of one step between one device and its host.

    Attributes:
        nbytes: bytes in both directions.
        time_us: microseconds in which the link is busy.
        exposed_us: the part of `time_us` that compute does not hide.
    """

    nbytes: float = 0.0
    time_us: float = 0.0
    exposed_us: float = 0.0


class HostTraffic:
    """The transfers of a program. What does not depend on the layout is found once.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        stretches: its stretches.
        chip: the device.
        distinct: inputs that share no class with other values.
    """

    def __init__(
        self,
        axes: LogicalAxes,
        roles: Roles,
        stretches: Stretches,
        chip: Chip,
        distinct: frozenset[int] = frozenset(),
    ):
        places = zip(stretches.ops, stretches.number.tolist(), strict=True)
        moved = [(op, stretch, n) for op, stretch in places if is_host_transfer(op) for n in _moved(op)]
        self.is_empty = not moved
        if self.is_empty:
            return
        values = [op.operands[n] for op, _, n in moved]
        found = value_classes(axes, roles, values, distinct)
        self.examples = found.examples
        # (stretch, class of the value, whether it goes to the host) -> bytes of a step before sharding
        self.whole: dict[tuple[int, int, bool], float] = defaultdict(float)
        # (stretch, class of the value) -> bytes that the first iterations of its loop wait for
        self.first: dict[tuple[int, int], float] = defaultdict(float)
        # stretch -> the results that its loop sends in their own iteration, in the order in which they are computed, as
        # (`HostMoves.done`, class of the value, bytes of a step before sharding)
        self.now: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
        moves = host_moves(axes.program, chip) if chip.platform == "tpu" else {}
        kept, done = kept_slices(axes.program, moves), _done(axes.program, moves)
        lengths = {each.sent: each.maker.eqn.params["length"] for each in kept.values()}
        starts = _loop_starts(stretches)
        for (op, stretch, n), number in zip(moved, found.numbers.tolist(), strict=True):
            to_host, size = _compat.is_on_host(op.eqn.outvars[n].aval), nbytes(op.eqn.invars[n].aval)
            unsent = op.trips / lengths[op.results[n]] if op.results[n] in lengths else 0.0
            whole = size * (op.trips - unsent)
            self.whole[stretch, number, to_host] += whole
            if op.results[n] in done:
                self.now[stretch].append((done[op.results[n]], number, whole))
            if not to_host and op.operands[n] not in kept:
                self.first[stretch, number] += size * starts.get(id(op), 0.0)
        for sent_now in self.now.values():
            sent_now.sort()
        trips = dict(zip(stretches.number.tolist(), stretches.trips.tolist(), strict=True))
        self.trips = {stretch: trips[stretch] for stretch, _, _ in self.whole}

    def __call__(self, layout: Layout, times: StretchTimes, chip: Chip) -> HostTime:
        """Return the transfers of a step.

        Args:
            layout: the layout.
            times: the compute time of each stretch.
            chip: the chip. If its host bandwidth is unknown, transfers take no time.
        """
        if self.is_empty:
            return HostTime()
        fractions = [1 / layout.shard_count(axes_of(operand_spec(layout, v))) for v in self.examples]
        sent: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (stretch, number, to_host), whole in self.whole.items():
            sent[stretch][to_host] += whole * fractions[number]
        total = sum(map(sum, sent.values()))
        if not chip.host_bandwidth:
            return HostTime(total)
        per_byte = 1e6 / (chip.host_bandwidth * HOST_BANDWIDTH_REACHED)
        if chip.platform in EXPOSED_TRANSFERS:
            return HostTime(total, total * per_byte, total * per_byte)
        busy = {stretch: max(both) * per_byte for stretch, both in sent.items() if any(both)}
        compute = {stretch: times.total_us(stretch) * self.trips[stretch] for stretch in busy}
        waits: dict[int, float] = defaultdict(float)  # bytes for which the first iterations wait
        for (stretch, number), whole in self.first.items():
            waits[stretch] += whole * fractions[number]
        first = {s: (waits[s] if chip.hides_fetches else sent[s][False]) * per_byte for s in busy}
        late = {s: self._late_us(s, compute[s], fractions, per_byte) for s in busy}
        exposed = sum(first[s] + max(busy[s] - first[s] - compute[s], late[s] - compute[s], 0.0) for s in busy)
        return HostTime(total, sum(busy.values()), exposed)

    def _late_us(self, stretch: int, compute_us: float, fractions: Sequence[float], per_byte: float) -> float:
        """Return the time `late` of a stretch, as the docstring of this module defines it."""
        latest, link_us = 0.0, 0.0
        for before, number, whole in reversed(self.now.get(stretch, [])):
            link_us += whole * fractions[number] * per_byte
            latest = max(latest, before * compute_us + link_us)
        return latest


def _done(program: Program, moves: Mapping[int, HostMoves]) -> dict[int, float]:
    """Return the fraction `HostMoves.done` of each value in host memory that a loop sends in its own iteration."""
    found: dict[int, float] = {}
    for op in program.ops():
        if id(op) in moves:
            results = op.blocks[0].outputs[_compat.scan_arity(op.eqn.params)[1] :]
            found.update(zip((results[k] for k in moves[id(op)].sent), moves[id(op)].done, strict=True))
    return found


def _loop_starts(stretches: Stretches) -> dict[int, float]:
    """Return the id of each operator in a scan -> how often its innermost scan starts in a step."""
    found: dict[int, float] = {}
    for op in stretches.ops:  # inner scans come after the outer ones
        if op.name == "scan":
            found.update(dict.fromkeys(map(id, walk(op.blocks[0])), op.trips))
    return found


def _moved(op: Op) -> Iterator[int]:
    """Yield the numbers of the operands that an operator moves from one memory to the other."""
    for n, (a, b) in enumerate(zip(op.eqn.invars, op.eqn.outvars, strict=True)):
        if op.operands[n] >= 0 and _compat.is_on_host(a.aval) != _compat.is_on_host(b.aval):
            yield n
