"""The best assignment of devices to mesh axes is that of a search which prices all of them."""

import numpy as np
import pytest

from autoshard.sharding.cost import collectives
from autoshard.sharding.cost.collectives import Ring, best_assignment, collective, reassigned, step_cost
from autoshard.sharding.cost.offload_time import HostTime
from autoshard.sharding.cost.overlap import Place
from autoshard.sharding.machines.device_assignments import assignments
from autoshard.sharding.machines.targets import find_target
from tests.sharding.cost.test_overlap import straight

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def drawn_cost(machine, mesh, seed):
    """A step with random collectives, of which compute hides some, and a ring."""
    rng = np.random.default_rng(seed)
    first = next(assignments(machine.topology, mesh, list(mesh)))
    groups = [(axis,) for axis in mesh] + [tuple(mesh)]
    found = []
    for number in range(6):
        kind, axes = KINDS[rng.integers(len(KINDS))], groups[rng.integers(len(groups))]
        place = Place(np.array([number % 4]), kind == "all-gather") if rng.random() < 0.5 else None
        found.append(collective(first, kind, axes, 10 ** rng.uniform(3, 9), float(rng.integers(1, 40)), "", place))
    ring = Ring(mesh[axis := list(mesh)[0]] - 1, float(rng.uniform(0, 500)))
    found.append(collective(first, "collective-permute", (axis,), 10 ** rng.uniform(3, 8), 2.0, "", ring=ring))
    return step_cost(1e4, found, machine.chip, HostTime(), straight().times([2500.0] * 4))


@pytest.mark.parametrize(
    ("target", "mesh"),
    [
        ("v5p:4x4x8", {"dp": 4, "fsdp": 8, "tp": 4}),
        ("v5e:4x4*2", {"dp": 2, "fsdp": 4, "tp": 4}),
        ("tpu7x:4x4x4", {"dp": 2, "fsdp": 16, "tp": 4}),
        ("h100:4x8", {"dp": 8, "fsdp": 4}),
    ],
)
def test_no_other_assignment_gives_a_faster_step(target, mesh, monkeypatch):
    machine, priced = find_target(target), []
    monkeypatch.setattr(collectives, "reassigned", lambda *args: priced.append(1) or reassigned(*args))
    tried = 0
    for seed in range(20):
        cost = drawn_cost(machine, mesh, seed)
        every = [
            reassigned(cost, one, machine.chip).step_time_us
            for order in (list(mesh), list(mesh)[::-1])
            for one in assignments(machine.topology, mesh, order)
        ]
        tried += len(every)
        assignment, best = best_assignment(machine, mesh, cost)
        assert best.step_time_us == reassigned(cost, assignment, machine.chip).step_time_us
        assert best.step_time_us <= min(every) * (1 + 1e-9)
    assert len(priced) < tried  # a lower bound rules the others out
