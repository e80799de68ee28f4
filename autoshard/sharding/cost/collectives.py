"""The time of collectives: what each sends, which devices form its groups, and how long the links take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.cost.constants import ALL_REDUCE_PASSES, HIDING_SHARE, MOST_ASSIGNMENTS, TIME_TOLERANCE
from autoshard.sharding.cost.offload_time import HostTime
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED, Chip
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.machines.topology import DeviceAssignment, assignments
from autoshard.spmdrules.core.placement import ReshardKind, bytes_sent_per_byte


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
        prefetchable: whether compute can hide it, because it moves parameters or gradients.
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    requested: ReshardKind
    local_bytes: float
    wire_bytes: float
    count: float
    time_us: float
    line: str
    prefetchable: bool = False


@shown
@dataclass(eq=False)
class LiveBuffers:
    """Buffers of one size that a device holds besides the program's own values, and their live ranges.

    They are gathered operands, results that are still to be scattered, or memory of an opaque operator.

    Attributes:
        nbytes: bytes of each buffer.
        first: for each buffer, the number of the first operator that has it, counted as in `Program.ops`.
        last: for each buffer, the number of the last one.
    """

    nbytes: float
    first: np.ndarray
    last: np.ndarray


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


def collective(
    assignment: DeviceAssignment,
    requested: ReshardKind,
    axes: tuple[str, ...],
    local_bytes: float,
    count: float,
    line: str,
    prefetchable: bool = False,
) -> Collective:
    """Return a collective as XLA emits it on the devices of its mesh axes."""
    kind, factor, devices = assignment.compiled(requested, axes)
    local = local_bytes * factor
    wire = bytes_sent_per_byte(kind, devices) * local
    time = assignment.time_us(kind, axes, local) * count
    return Collective(kind, axes, requested, local_bytes, wire, count, time, line, prefetchable)


def step_cost(kernels_us: float, collectives: Sequence[Collective], chip: Chip, host: HostTime) -> StepCost:
    """Return the cost of a step from the time of its kernels, its collectives and its transfers of host memory."""
    comm = sum(c.time_us for c in collectives)
    hidden = sum(c.time_us for c in collectives if c.prefetchable and c.kind in chip.hides)
    # An all-reduce sends each byte twice.
    reduced = sum(c.wire_bytes * c.count / 2 for c in collectives if c.kind != c.requested)
    compute = kernels_us + ALL_REDUCE_PASSES * reduced / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
    wire = sum(c.wire_bytes * c.count for c in collectives)
    step = compute + comm - min(hidden, HIDING_SHARE * compute) + host.exposed_us
    return StepCost(step, compute, comm, wire, tuple(collectives), kernels_us, host)


def reassigned(cost: StepCost, assignment: DeviceAssignment, chip: Chip) -> StepCost:
    """Return the cost of the same step under another device assignment."""
    moved = [
        collective(assignment, c.requested, c.axes, c.local_bytes, c.count, c.line, c.prefetchable)
        for c in cost.collectives
    ]
    return replace(step_cost(cost.kernels_us, moved, chip, cost.host), live_buffers=cost.live_buffers)


def best_assignment(target: Target, mesh: Mapping[str, int], cost: StepCost) -> tuple[DeviceAssignment, StepCost]:
    """Return the device assignment under which a step takes the least time. The first one wins ties.

    Mesh axes are assigned in three orders: reversed mesh order, descending traffic, and mesh order.
    """
    sent: dict[str, float] = dict.fromkeys(mesh, 0.0)
    for c in cost.collectives:
        for a in c.axes:
            sent[a] += c.wire_bytes * c.count
    by_traffic = sorted(mesh, key=lambda a: -sent[a])
    orders = dict.fromkeys([tuple(reversed(list(mesh))), tuple(by_traffic), tuple(mesh)])
    best: tuple[DeviceAssignment, StepCost] | None = None
    for order in orders:
        for assignment in islice(assignments(target.topology, mesh, order), MOST_ASSIGNMENTS):
            new = reassigned(cost, assignment, target.chip)
            if best is None or new.step_time_us < best[1].step_time_us * (1 - TIME_TOLERANCE):
                best = assignment, new
    assert best is not None
    return best
