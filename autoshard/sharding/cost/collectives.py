"""Time of collectives: what each sends, where its groups lie, and how long its links take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from autoshard._shown import shown
from autoshard.sharding.machines.chips import BANDWIDTH_REACHED, Chip
from autoshard.sharding.machines.targets import Target
from autoshard.sharding.machines.topology import DeviceAssignment, assignments
from autoshard.spmdrules.core.placement import ReshardKind, bytes_sent_per_byte

HIDING = 0.9  # the part of a step's compute that can hide traffic


MOST_LAYINGS = 64  # tried for each order of the axes


INSTEAD_PASSES = 4  # over its memory by an all-reduce in place of a gather or a scattered sum, beside its traffic


@shown
@dataclass(frozen=True)
class Collective:
    """A collective of one step.

    Attributes:
        kind: what XLA makes of it.
        axes: the mesh axes that it runs over, at once.
        asked: what is asked for: another kind where XLA cannot do it on the devices where the axes lie.
        local_bytes: what a device has before what is asked for.
        wire_bytes: bytes that leave each device in one run.
        count: runs a step.
        time_us: of all its runs.
        line: the user's.
        ahead: whether nothing that is computed meanwhile waits for it: it moves parameters or gradients.
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    asked: ReshardKind
    local_bytes: float
    wire_bytes: float
    count: float
    time_us: float
    line: str
    prefetchable: bool = False


@shown
@dataclass(eq=False)
class LiveBuffers:
    """Arrays that a device holds besides its own: gathered for operators, behind one to be scattered, or inside.

    Attributes:
        nbytes: bytes of each of them.
        first: for each of them, the first operator that has it, counted as in `Program.ops`.
        last: for each of them, the last one.
    """

    nbytes: float
    first: np.ndarray
    last: np.ndarray


@shown
@dataclass(frozen=True)
class StepCost:
    """What one step costs on one device: times in microseconds, bytes that leave it."""

    step_time_us: float
    compute_us: float
    comm_us: float
    comm_bytes: float
    collectives: tuple[Collective, ...]
    kernels_us: float = 0.0  # of compute_us, the program's kernels
    waiting: tuple[LiveBuffers, ...] = field(default=(), repr=False)


def collective(
    laying: DeviceAssignment,
    asked: ReshardKind,
    axes: tuple[str, ...],
    local_bytes: float,
    count: float,
    line: str,
    ahead: bool = False,
) -> Collective:
    """A collective as XLA does it where its axes lie."""
    kind, more, devices = laying.compiled(asked, axes)
    local = local_bytes * more
    wire = bytes_sent_per_byte(kind, devices) * local
    time = laying.time_us(kind, axes, local) * count
    return Collective(kind, axes, asked, local_bytes, wire, count, time, line, ahead)


def summed(kernels_us: float, collectives: Sequence[Collective], chip: Chip) -> StepCost:
    """The cost of a step from its parts."""
    comm = sum(c.time_us for c in collectives)
    hidden = sum(c.time_us for c in collectives if c.prefetchable and c.kind in chip.hides)
    instead = sum(c.wire_bytes * c.count / 2 for c in collectives if c.kind != c.asked)  # an all-reduce sends it twice
    compute = kernels_us + INSTEAD_PASSES * instead / (chip.memory_bandwidth * BANDWIDTH_REACHED) * 1e6
    wire = sum(c.wire_bytes * c.count for c in collectives)
    step = compute + comm - min(hidden, HIDING * compute)
    return StepCost(step, compute, comm, wire, tuple(collectives), kernels_us)


def reassigned(cost: StepCost, laying: DeviceAssignment, chip: Chip) -> StepCost:
    """The same step with its mesh axes laid onto other devices."""
    again = [
        collective(laying, c.asked, c.axes, c.local_bytes, c.count, c.line, c.prefetchable) for c in cost.collectives
    ]
    return replace(summed(cost.kernels_us, again, chip), waiting=cost.waiting)


def best_assignment(target: Target, mesh: Mapping[str, int], cost: StepCost) -> tuple[DeviceAssignment, StepCost]:
    """Where to lay the axes of a mesh so that a step's traffic takes the least time; ties go to the plainest.

    The axes are given their places in the order of their traffic, the heaviest first or last, and in mesh order.
    """
    heavy: dict[str, float] = dict.fromkeys(mesh, 0.0)
    for c in cost.collectives:
        for a in c.axes:
            heavy[a] += c.wire_bytes * c.count
    by_traffic = sorted(mesh, key=lambda a: -heavy[a])
    orders = dict.fromkeys([tuple(reversed(list(mesh))), tuple(by_traffic), tuple(mesh)])
    best: tuple[DeviceAssignment, StepCost] | None = None
    for first in orders:
        for laying in islice(assignments(target.topology, mesh, first), MOST_LAYINGS):
            now = reassigned(cost, laying, target.chip)
            if best is None or now.step_time_us < best[1].step_time_us * (1 - 1e-9):
                best = laying, now
    assert best is not None
    return best
