"""The time of collectives: what each sends, which devices form its groups, and how long the links take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.cost.constants import (
    ALL_REDUCE_PASSES,
    KNOWN_ASSIGNMENTS,
    MOST_ASSIGNMENTS,
    TIME_TOLERANCE,
)
from autoshard.sharding.cost.offload_time import HostTime
from autoshard.sharding.cost.overlap import Overlap, Place
from autoshard.sharding.cost.stretches import StretchTimes
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED, Chip
from autoshard.sharding.machines.constants import NCCL_CHANNELS
from autoshard.sharding.machines.device_assignments import DeviceAssignment, assignments
from autoshard.sharding.machines.links import Links
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.machines.topology import Topology
from autoshard.spmdrules.core.placement import ReshardKind


@shown
@dataclass(frozen=True)
class Ring:
    """The transfers of one run of an operator on a ring.

    Attributes:
        hops: the number of transfers to the next device.
        beside_us: microseconds of the operator's compute that hide them.
    """

    hops: int
    beside_us: float


@shown
@dataclass(frozen=True)
class Collective:
    """A collective of one step.

    Attributes:
        kind: the collective that XLA emits.
        axes: the mesh axes of its groups; it runs over all of them at once.
        requested: the collective that the layout needs. It differs from `kind` where XLA cannot do it on these devices.
        local_bytes: bytes of each device's operand of the requested collective.
        wire_bytes: bytes that leave each device in one run.
        count: number of runs in a step.
        time_us: microseconds of all its runs.
        line: the user's source line.
        ops: the numbers of the operators that need it; None if none do.
        array: what it moves: operand 0, 1, ... or, as -1, -2, ..., result 0, 1, ... of these operators.
        place: where it runs, if it moves parameters or gradients, so that compute can hide it; None for activations.
        exposed_us: the part of `time_us` that compute does not hide.
        ring: the transfers of a ring, which run beside the compute of their own operator; None for any other.
        devices: the number of devices of a group; 0 for a ring.
        box_dims: the number of dimensions of the topology that a group spans; 0 if other devices lie in between.
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    requested: ReshardKind
    local_bytes: float
    wire_bytes: float
    count: float
    time_us: float
    line: str
    place: Place | None = field(default=None, repr=False)
    ops: np.ndarray | None = field(default=None, repr=False, compare=False)
    array: int = 0
    exposed_us: float = 0.0
    ring: Ring | None = None
    devices: int = 0
    box_dims: int = 0

    @property
    def once_us(self) -> float:
        """Microseconds of one run."""
        return self.time_us / self.count if self.count else 0.0


@shown
@dataclass(eq=False)
class LiveBuffers:
    """Buffers of one size that a device holds besides the program's own values, and their live ranges.

    They are gathered operands, results that are still to be scattered, or memory of an opaque operator.

    Attributes:
        nbytes: bytes of each buffer.
        first: for each buffer, the number of the first operator that has it, counted as in `Program.ops`.
        last: for each buffer, the number of the last one.
        is_divided: whether each is the memory of an opaque operator, which consists of several arrays.
    """

    nbytes: float
    first: np.ndarray
    last: np.ndarray
    is_divided: bool = False


@shown
@dataclass(frozen=True)
class StepCost:
    """The cost of one step on one device: times in microseconds, and bytes that leave the device."""

    step_time_us: float
    compute_us: float
    comm_us: float
    comm_bytes: float
    collectives: tuple[Collective, ...]
    kernels_us: float = 0.0  # the part of compute_us that the program's kernels take
    host: HostTime = HostTime()
    live_buffers: tuple[LiveBuffers, ...] = field(default=(), repr=False)
    overlap: Overlap | None = field(default=None, repr=False)  # None if compute can hide no collective
    # Parameters that are gathered one layer early, as (number of the scan, or -1 - number of the stage; value).
    early: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)


def collective(
    assignment: DeviceAssignment,
    requested: ReshardKind,
    axes: tuple[str, ...],
    local_bytes: float,
    count: float,
    line: str,
    place: Place | None = None,
    ring: Ring | None = None,
    ops: np.ndarray | None = None,
    array: int = 0,
) -> Collective:
    """Return a collective as XLA emits it on the devices of its mesh axes."""
    if ring is not None:
        time = ring.hops * assignment.shift_us(axes, local_bytes) * count
        wire = ring.hops * local_bytes
        return Collective(requested, axes, requested, local_bytes, wire, count, time, line, exposed_us=time, ring=ring)
    found = assignment.links(requested, axes)
    local = local_bytes * found.factor
    time = found.time_us(local) * count
    made = object.__new__(Collective)  # the constructor takes five times as long, and a search makes many
    made.__dict__.update(
        kind=found.kind, axes=axes, requested=requested, local_bytes=local_bytes, wire_bytes=found.sent * local,
        count=count, time_us=time, line=line, place=place, ops=ops, array=array, exposed_us=time, ring=None,
        devices=found.devices, box_dims=found.box_dims,
    )  # fmt: skip
    return made


def merged_reductions(moves: tuple[Move, ...]) -> tuple[Move, ...]:
    """Merge the reductions of an operator as a compiler without reduce-scatters does.

    If several mesh axes reduce an array, and only some of them shard the result, an all-reduce of the shards follows
    the reduce-scatter. Such a compiler emits one all-reduce over all of these axes instead. The merged move is a
    reduce-scatter over all of them, for which `Topology.compiled` returns this all-reduce.
    """
    scattered = {m.array: m for m in moves if m.kind == "reduce-scatter"}
    rest = {m.array: m.axes for m in moves if m.kind == "all-reduce" and m.array in scattered}
    if not rest:
        return moves
    return tuple(
        m._replace(axes=(*rest.get(m.array, ()), *m.axes)) if m.kind == "reduce-scatter" else m
        for m in moves
        if m.kind != "all-reduce" or m.array not in rest
    )


def step_cost(
    kernels_us: float,
    collectives: Sequence[Collective],
    chip: Chip,
    host: HostTime,
    times: StretchTimes,
    *,
    sequential: bool = False,
    copies_us: Mapping[int, float] | None = None,
) -> StepCost:
    """Return the cost of a step.

    Args:
        kernels_us: microseconds of its kernels.
        collectives: its collectives.
        chip: the chip.
        host: its transfers of host memory.
        times: the compute time of each stretch.
        sequential: whether parameters are gathered one after another.
        copies_us: see `Overlap`; a part of `kernels_us`, too.
    """
    places = [c.place for c in collectives]
    hides = chip.hides and any(place is not None for place in places)
    overlap = Overlap(places, times, sequential=sequential, copies_us=copies_us) if hides else None
    return _step_cost(kernels_us, collectives, chip, host, overlap)


def _step_cost(
    kernels_us: float, collectives: Sequence[Collective], chip: Chip, host: HostTime, overlap: Overlap | None
) -> StepCost:
    comm = sum(c.time_us for c in collectives)
    if overlap is not None:
        can_hide = [c.place is not None and is_hidden_on(chip, c) and c.count > 0 for c in collectives]
        once = [c.once_us if hides else 0.0 for c, hides in zip(collectives, can_hide, strict=True)]
        waits = overlap.exposed_us(once).tolist()
        collectives = [
            _exposing(c, us) if hides and c.exposed_us != us else c
            for c, hides, us in zip(collectives, can_hide, waits, strict=True)
        ]
    if chip.platform != "cpu":  # XLA's compilers for accelerators make all collective-permutes asynchronous
        collectives = [c if c.ring is None else _exposing(c, _exposed_on_ring(c, c.ring)) for c in collectives]
    # An all-reduce sends each byte twice.
    moved = sum(
        ALL_REDUCE_PASSES[c.requested] * c.wire_bytes * c.count / 2 for c in collectives if c.kind != c.requested
    )
    compute = kernels_us + moved / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
    if chip.multiprocessors:  # a hidden collective slows compute, because it takes some of the multiprocessors
        hidden = sum(c.time_us - c.exposed_us for c in collectives)
        compute += hidden * min(NCCL_CHANNELS / chip.multiprocessors, 1.0)
    wire = sum(c.wire_bytes * c.count for c in collectives)
    step = compute + sum(c.exposed_us for c in collectives) + host.exposed_us
    return StepCost(step, compute, comm, wire, tuple(collectives), kernels_us, host=host, overlap=overlap)


def _exposing(one: Collective, exposed_us: float) -> Collective:
    """Return a collective with another exposed time. `replace` takes ten times as long, and a search makes many."""
    changed = object.__new__(Collective)
    changed.__dict__.update(one.__dict__, exposed_us=exposed_us)
    return changed


def is_hidden_on(chip: Chip, found: Collective | Links) -> bool:
    """Return whether compute on a chip can hide this collective, or a collective on these links."""
    alone = found.devices <= chip.synchronous_gathers or found.box_dims < chip.gather_dims
    if found.kind == "all-gather" and alone and not chip.keeps_gathers:
        return False
    return found.kind in chip.hides


def _exposed_on_ring(travel: Collective, ring: Ring) -> float:
    return max(travel.time_us - ring.beside_us * travel.count, 0.0)


def reassigned(cost: StepCost, assignment: DeviceAssignment, chip: Chip) -> StepCost:
    """Return the cost of the same step under another device assignment."""
    moved = [
        collective(assignment, c.requested, c.axes, c.local_bytes, c.count, c.line, c.place, c.ring, c.ops, c.array)
        for c in cost.collectives
    ]
    new = _step_cost(cost.kernels_us, moved, chip, cost.host, cost.overlap)
    return replace(new, live_buffers=cost.live_buffers, early=cost.early)


def best_assignment(target: Target, mesh: Mapping[str, int], cost: StepCost) -> tuple[DeviceAssignment, StepCost]:
    """Return the device assignment under which a step takes the least time. The first one wins ties.

    Mesh axes are assigned in three orders: reversed mesh order, descending traffic, and mesh order.
    """
    sent: dict[str, float] = dict.fromkeys(mesh, 0.0)
    for c in cost.collectives:
        for a in c.axes:
            sent[a] += c.wire_bytes * c.count
    by_traffic = sorted(mesh, key=lambda a: -sent[a])
    orders = tuple(dict.fromkeys([tuple(reversed(list(mesh))), tuple(by_traffic), tuple(mesh)]))
    kinds = dict.fromkeys((c.requested, c.axes) for c in cost.collectives if c.ring is None)
    on_rings = dict.fromkeys(c.axes for c in cost.collectives if c.ring is not None)
    least_us = _least_time(cost)
    best: tuple[DeviceAssignment, StepCost] | None = None
    axes = tuple(mesh.items())
    for assignment in _distinct_assignments(target.topology, axes, orders, tuple(kinds), tuple(on_rings)):
        if best is not None and least_us(assignment) >= best[1].step_time_us:
            continue
        new = reassigned(cost, assignment, target.chip)
        if best is None or new.step_time_us < best[1].step_time_us * (1 - TIME_TOLERANCE):
            best = assignment, new
    assert best is not None
    return best


def _least_time(cost: StepCost) -> Callable[[DeviceAssignment], float]:
    """Return a lower bound of the step's microseconds under a device assignment.

    It has the kernels, the transfers of host memory, and the collectives that compute cannot hide.
    """
    sums: dict[tuple[ReshardKind, tuple[str, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for c in cost.collectives:
        if c.ring is None and c.place is None:
            found = sums[c.requested, c.axes]
            found[:] = found[0] + c.count, found[1] + c.count * c.local_bytes
    fixed_us = cost.kernels_us + cost.host.exposed_us

    def least_us(assignment: DeviceAssignment) -> float:
        total_us = fixed_us
        for (requested, axes), (count, local_bytes) in sums.items():
            links = assignment.links(requested, axes)
            total_us += count * links.latency_us + links.us_per_byte * links.factor * local_bytes
        return total_us

    return least_us


@lru_cache(maxsize=KNOWN_ASSIGNMENTS)
def _distinct_assignments(
    topology: Topology,
    mesh: tuple[tuple[str, int], ...],
    orders: tuple[tuple[str, ...], ...],
    kinds: tuple[tuple[ReshardKind, tuple[str, ...]], ...],
    on_rings: tuple[tuple[str, ...], ...],
) -> tuple[DeviceAssignment, ...]:
    """Return the assignments that are tried, one of each set under which all collectives have the same links.

    Args:
        topology: the topology.
        mesh: the axes of the mesh and their sizes.
        orders: the orders in which axes are assigned.
        kinds: the requested kinds and mesh axes of collectives that are not rings.
        on_rings: the mesh axes of rings.
    """
    found: dict[Any, DeviceAssignment] = {}
    for order in orders:
        for assignment in _assignments(topology, mesh, order):
            links = tuple(assignment.links(requested, axes) for requested, axes in kinds)
            rings = tuple(assignment.pieces_of(axes) for axes in on_rings)
            found.setdefault((assignment.topology, links, rings), assignment)
    return tuple(found.values())


@lru_cache(maxsize=KNOWN_ASSIGNMENTS)
def _assignments(
    topology: Topology, mesh: tuple[tuple[str, int], ...], order: tuple[str, ...]
) -> tuple[DeviceAssignment, ...]:
    """Return the assignments that are tried. They are the same objects for equal meshes, and keep their `links`."""
    return tuple(islice(assignments(topology, dict(mesh), order), MOST_ASSIGNMENTS))


def traffic(cost: StepCost) -> list[tuple[tuple[str, str, float, str], tuple[float, float]]]:
    """Return the collectives of a step in the form of `Plan.traffic` and `Plan.traffic_us`.

    Collectives of one kind, one source line and the same mesh axes are added up.
    """
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c in cost.collectives:
        sums = found[c.kind, " ".join(c.axes), c.line]
        sums[:] = sums[0] + c.wire_bytes * c.count, sums[1] + c.time_us, sums[2] + c.exposed_us
    ranked = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    return [((kind, axes, size, line), (us, exposed)) for (kind, axes, line), (size, us, exposed) in ranked]
